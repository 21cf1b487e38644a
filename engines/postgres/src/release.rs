//! `leave`, `amend`, `evict` and `resize`.

use super::client::Client;
use super::local_queue::Was;
use super::statements::{Parameters, Verb};
use super::{error, from_ask, signed};
use palisade_core::engine::{
    Amended, Amendment, ClaimId, Left, READERS, Ticket, capacity_mismatch,
};
use palisade_core::{Error, ErrorKind, Eviction, Name, Result};

pub(super) async fn leave(client: &Client, ticket: &Ticket) -> Result<Left> {
    let in_doubt = match client.queue.leave(&ticket.name, ticket.claim) {
        Was::Local => return Ok(Left::Done),
        // Its enter may still be in flight.
        Was::Entering => true,
        Was::Elsewhere => ticket.in_doubt,
    };
    client.hub.forget(ticket.claim);
    let (name, claim) = (ticket.name.as_str(), ticket.claim.to_string());
    let sequence = signed(ticket.sequence);
    let parameters: Parameters<'_> = &[&client.namespace, &name, &claim, &sequence, &in_doubt];
    let answer = client.numbers("leave", Verb::Leave, parameters).await?;
    let left = match *answer.as_slice() {
        [0] => Left::Absent,
        [1] => Left::Done,
        _ => return error::unreadable("leave"),
    };
    client.queue.is_over(&ticket.name, ticket.claim);
    Ok(left)
}

pub(super) async fn amend(
    client: &Client,
    ticket: &Ticket,
    amendment: &Amendment,
) -> Result<Amended> {
    let (weight, capacity, value) = match amendment {
        Amendment::Ask(ask) => {
            let (weight, capacity) = from_ask(*ask);
            (Some(weight), Some(capacity), None)
        }
        Amendment::Value(value) => (None, None, Some(value)),
    };
    let answer = client
        .numbers(
            "amend",
            Verb::Amend,
            &[
                &client.namespace,
                &ticket.name.as_str(),
                &ticket.claim.to_string(),
                &signed(ticket.sequence),
                &weight,
                &capacity,
                &value,
            ],
        )
        .await?;
    match *answer.as_slice() {
        [0] => Ok(Amended::Gone),
        [1] => Ok(Amended::Done),
        [2] => Ok(Amended::Busy),
        _ => error::unreadable("amend"),
    }
}

pub(super) async fn evict(
    client: &Client,
    name: &Name,
    id: &str,
    eviction: Eviction,
) -> Result<bool> {
    let Ok(claim) = id.parse::<ClaimId>() else {
        return Ok(false);
    };
    let (claim, remove) = (claim.to_string(), eviction == Eviction::Remove);
    let parameters: Parameters<'_> = &[&client.namespace, &name.as_str(), &claim, &remove];
    Ok(client.numbers("evict", Verb::Evict, parameters).await? == [1])
}

pub(super) async fn resize(client: &Client, name: &Name, capacity: u32) -> Result<bool> {
    let (wanted, readers) = (i64::from(capacity), i64::from(READERS));
    let parameters: Parameters<'_> = &[&client.namespace, &name.as_str(), &wanted, &readers];
    let answer = client.numbers("resize", Verb::Resize, parameters).await?;
    match *answer.as_slice() {
        [0] => Ok(false),
        [1] => Ok(true),
        [2] => Err(capacity_mismatch(READERS, capacity)),
        [3, weight] => {
            let message =
                format!("a claim in this line takes {weight} permits, more than {capacity}");
            Err(Error::new(ErrorKind::InvalidArgument, "resize", message))
        }
        _ => error::unreadable("resize"),
    }
}
