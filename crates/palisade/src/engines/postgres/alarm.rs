//! Alarms: what the keeper must hear of at once, pushed by the server to this client's channel.

use std::time::Duration;

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::desk::Desk;
use super::mail::Heard;
use crate::core::engine::Alarm;

/// Between two tries to listen for alarms while the server is away.
const RETRY: Duration = Duration::from_millis(250);

impl Desk {
    /// Waits for the next alarm. `listening` is what was heard on so far.
    pub(super) async fn alarm(&self, listening: &mut Option<Receiver<Heard>>) -> Alarm {
        loop {
            let Some(heard) = listening else {
                match self.mail().await {
                    Ok(Some(mail)) => {
                        *listening = Some(mail.listen());
                        // Whatever was said before is told by renewing.
                        return Alarm::All;
                    }
                    // Renewals tell, a little later.
                    Ok(None) => std::future::pending().await,
                    Err(_) => tokio::time::sleep(RETRY).await,
                }
                continue;
            };
            match heard.recv().await {
                Ok(Heard::Evicted(claim)) => return Alarm::Lease(claim.into()),
                Err(RecvError::Lagged(_)) => return Alarm::All,
                Ok(Heard::End) | Err(_) => *listening = None,
            }
        }
    }
}
