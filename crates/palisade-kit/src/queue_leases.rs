//! Renewal of claimed messages for stores where one request concerns one queue.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;

use palisade_core::engine::{Lease, LeaseStart, Renewal};
use palisade_core::queue::Receipt;
use palisade_core::{BootTime, Name, Result};

/// Calls `renew` once per queue, concurrently; it returns the ttl of each claim that was renewed.
pub async fn renew_by_queue<F>(
    leases: &[Lease],
    renew: impl Fn(Name, Vec<Receipt>) -> F,
) -> Vec<Renewal>
where
    F: Future<Output = Result<Vec<Option<Duration>>>>,
{
    // A lease without a receipt does not come from a queue store.
    let mut renewals: Vec<Renewal> = leases.iter().map(|_| Renewal::Lost).collect();
    let mut queues: HashMap<&Name, (Vec<usize>, Vec<Receipt>)> = HashMap::new();
    for (at, lease) in leases.iter().enumerate() {
        if let Some(ticket) = &lease.ticket
            && let Some(receipt) = Receipt::of(ticket)
        {
            let (places, receipts) = queues.entry(&ticket.name).or_default();
            places.push(at);
            receipts.push(receipt);
        }
    }
    // Read before any request is sent.
    let sent = BootTime::now();
    let asked = queues.into_iter().map(|(queue, (places, receipts))| {
        let renewed = renew(queue.clone(), receipts);
        async move { (places, renewed.await) }
    });
    for (places, answer) in join_all(asked).await {
        for (index, at) in places.into_iter().enumerate() {
            renewals[at] = match &answer {
                Ok(ttls) => match ttls.get(index).copied().flatten() {
                    Some(ttl) => Renewal::Held(LeaseStart { sent, ttl }),
                    None => Renewal::Lost,
                },
                Err(error) => Renewal::Unknown(error.clone()),
            };
        }
    }
    renewals
}
