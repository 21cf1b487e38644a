//! NOTIFY: what the server sends to one client, and who waits for it.
//!
//! A notification is `g`, a claim, and the token of its grant (without a token the claim was
//! removed); or `e` and a claim that an operator evicts. A grant is announced when it commits. A
//! token above the line's last token, as of when the claim was seen waiting, is the token of its
//! grant. When a connection ends, all waiters wake up and poll.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};

use super::client::Client;
use super::connection::{Listener, Notice};
use palisade_core::engine::{Alarm, BoxStream, ClaimId};
use palisade_kit::push::PushHub;

/// The pause before another attempt to listen for alarms while the server is down.
const RETRY: Duration = Duration::from_millis(250);

/// Parses a notification: its kind, its claim and the rest.
pub(super) fn parse(text: &str) -> Option<(&str, ClaimId, &str)> {
    let (kind, rest) = text.split_at_checked(1)?;
    let (claim, token) = rest.split_once(' ').unwrap_or((rest, ""));
    Some((kind, claim.replace('-', "").parse().ok()?, token))
}

/// Passes the notices of a connection on to `hub`.
pub(super) fn listener(hub: &Arc<PushHub>) -> Listener {
    let hub = Arc::clone(hub);
    Arc::new(move |notice| match notice {
        Notice::Text(text) => match parse(text) {
            Some(("g", claim, token)) => hub.wake(claim, token.parse().unwrap_or(0)),
            Some(("e", claim, _)) => hub.alarm(claim),
            _ => {}
        },
        Notice::End => {
            hub.alarm_all();
            hub.wake_all();
        }
    })
}

/// The alarms for the keeper. Each time listening begins, all leases are checked, because earlier
/// notifications were missed.
pub(super) fn alarms(client: &Arc<Client>) -> BoxStream<Alarm> {
    let start = (client.hub.alarms(), Arc::clone(client), false);
    stream::unfold(start, |(mut alarms, client, mut listening)| async move {
        loop {
            if listening {
                match alarms.recv().await {
                    Ok(Alarm::All) => listening = false,
                    Ok(alarm) => return Some((alarm, (alarms, client, true))),
                    Err(_) => return Some((Alarm::All, (alarms, client, true))),
                }
                continue;
            }
            match client.listen().await {
                Ok(true) => return Some((Alarm::All, (alarms, client, true))),
                // Without NOTIFY, renewals find out a little later.
                Ok(false) => std::future::pending().await,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    })
    .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::BootTime;

    #[tokio::test]
    async fn a_waiter_is_woken_for_its_claim_and_at_the_end() {
        let hub = Arc::new(PushHub::new());
        let say = listener(&hub);
        let waiter = hub.waiter(ClaimId(7));
        waiter.waits(11, BootTime::NEVER);
        say(Notice::Text("g00000000-0000-0000-0000-000000000007"));
        waiter.woken.notified().await;
        assert_eq!(waiter.granted(), None, "it says no token");
        let other = "g00000000-0000-0000-0000-000000000008 13";
        for noise in ["", "g", "gx", "g 13", "é", other] {
            say(Notice::Text(noise));
        }
        assert_eq!(waiter.granted(), None, "of another");
        say(Notice::Text("g00000000-0000-0000-0000-000000000007 12"));
        waiter.woken.notified().await;
        assert_eq!(waiter.granted(), Some(12));
        waiter.waits(12, BootTime::NEVER);
        assert_eq!(waiter.granted(), None, "of an earlier stay");
        let mut alarms = hub.alarms();
        say(Notice::Text("e00000000-0000-0000-0000-000000000007"));
        let evicted = Alarm::Lease(ClaimId(7).into());
        assert_eq!(alarms.recv().await.unwrap(), evicted);
        say(Notice::End);
        waiter.woken.notified().await;
        assert_eq!(alarms.recv().await.unwrap(), Alarm::All);
    }
}
