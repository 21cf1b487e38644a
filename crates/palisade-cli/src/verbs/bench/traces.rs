//! `Traces`: what a measurement leaves in the engine while it runs, and takes away at its end,
//! be that its own or a signal's: claims of clients that go away, and batons of raw operations.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use palisade::Client;

use super::lane::Door;
use crate::exit::Failure;

/// An engine that does not answer must not keep palisade from ending.
const FAREWELL: Duration = Duration::from_secs(2);

/// Clients that are connected, and batons that were laid.
#[derive(Default)]
pub(super) struct Traces {
    clients: Mutex<Vec<Client>>,
    batons: Mutex<Vec<Door>>,
}

impl Traces {
    /// A client whose releases in the background are waited for at the end.
    pub(super) fn of(&self, client: Client) -> Client {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.push(client.clone());
        client
    }

    /// Lays the baton of a raw operation, to be taken away at the end.
    pub(super) async fn lay(&self, door: Door) -> Result<(), Failure> {
        door.lay_baton().await?;
        let mut batons = self.batons.lock().unwrap_or_else(PoisonError::into_inner);
        batons.push(door);
        Ok(())
    }

    /// Takes all of it away. To be called when nobody else uses the clients and batons any more.
    pub(super) async fn remove(&self) {
        // Tasks that were aborted drop what they hold when it is their turn.
        tokio::task::yield_now().await;
        let (batons, clients) = (take(&self.batons), take(&self.clients));
        let remove = async {
            for baton in batons {
                baton.take_baton_away().await;
            }
            for client in clients {
                client.close().await;
            }
        };
        let _ = tokio::time::timeout(FAREWELL, remove).await;
    }
}

fn take<T: Default>(traces: &Mutex<T>) -> T {
    std::mem::take(&mut *traces.lock().unwrap_or_else(PoisonError::into_inner))
}
