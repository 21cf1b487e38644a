//! `enter` and `wait`. The functions in the database decide; a NOTIFY announces a grant, or that
//! the claim should poll.

use std::sync::Arc;
use std::time::Duration;

use super::client::Client;
use super::local_queue::Next;
use super::statements::{Parameters, Verb};
use super::{error, from_ask, from_micros, micros};
use palisade_core::engine::{
    Claim, Entered, LeaseStart, Place, Ticket, capacity_mismatch, look_by, sync,
};
use palisade_core::{BootTime, Outcome, Result};

/// How often a waiter polls where NOTIFY is unavailable: ten requests a second, and a grant is
/// noticed 50 ms late on average.
const POLL: Duration = Duration::from_millis(100);

pub(super) async fn enter(client: &Client, claim: &Arc<Claim>) -> Result<Entered> {
    if !claim.queue {
        return enter_line(client, claim).await;
    }
    if !client.queue.admit(claim) {
        let armed = LeaseStart {
            sent: BootTime::now(),
            ttl: claim.ttl,
        };
        return Ok(entered(client, claim, Place::Waiting, armed));
    }
    let entered = enter_line(client, claim).await;
    match &entered {
        Ok(Entered::In {
            place: Place::Waiting,
            ..
        }) => client.queue.is_in_line(&claim.name, claim.id),
        // The caller retries it, or leaves.
        Err(error) if error.outcome() == Outcome::MaybeApplied => {}
        Ok(_) | Err(_) => client.queue.is_over(&claim.name, claim.id),
    }
    entered
}

fn entered(client: &Client, claim: &Claim, place: Place, armed: LeaseStart) -> Entered {
    let mut ticket = Ticket::own(claim.name.clone(), claim.id);
    ticket.native = Some(Arc::clone(&client.native));
    if let Place::Held { sequence } = place {
        ticket.sequence = sequence;
    }
    Entered::In {
        ticket,
        armed,
        place,
    }
}

async fn enter_line(client: &Client, claim: &Claim) -> Result<Entered> {
    let (weight, capacity) = from_ask(claim.ask);
    let sent = BootTime::now();
    let answer = client
        .numbers(
            "enter",
            Verb::Enter,
            &[
                &client.namespace,
                &claim.name.as_str(),
                &claim.id.to_string(),
                &weight,
                &capacity,
                &micros(claim.ttl),
                &claim.queue,
                &client.channel(),
                &claim.owner.to_json(),
                &claim.value,
            ],
        )
        .await?;
    let (place, left) = match *answer.as_slice() {
        [0] => return Ok(Entered::Busy),
        [1, sequence, left] => (held(sequence), left),
        [2, _, left] => (Place::Waiting, left),
        [3, live] => {
            let small = |number| u32::try_from(number).unwrap_or(u32::MAX);
            return Err(capacity_mismatch(small(live), small(capacity)));
        }
        _ => return error::unreadable("enter"),
    };
    let ttl = from_micros(left);
    Ok(entered(client, claim, place, LeaseStart { sent, ttl }))
}

fn held(sequence: i64) -> Place {
    Place::Held {
        sequence: sequence.unsigned_abs(),
    }
}

pub(super) async fn wait(client: &Client, ticket: &Ticket, until: BootTime) -> Result<Place> {
    let mut next = client.queue.next(&ticket.name, ticket.claim);
    if let Next::Stay(turn) = next {
        tokio::select! {
            () = turn.notified() => {}
            () = sync::sleep_until(look_by(until)) => {}
        }
        next = client.queue.next(&ticket.name, ticket.claim);
    }
    let place = match next {
        Next::Stay(_) => return Ok(Place::Waiting),
        Next::Enter(claim) => match enter(client, &claim).await? {
            Entered::Busy => Place::Gone,
            Entered::In { place, .. } => place,
        },
        Next::InLine => wait_in_line(client, ticket, until).await?,
    };
    if place != Place::Waiting {
        client.queue.is_over(&ticket.name, ticket.claim);
        client.hub.forget(ticket.claim);
    }
    Ok(place)
}

async fn wait_in_line(client: &Client, ticket: &Ticket, until: BootTime) -> Result<Place> {
    // The claim is registered before the read, so that no notification in between is missed.
    let listens = client.listen().await?;
    let waiter = client.hub.waiter(ticket.claim);
    let (due, last) = match standing(client, ticket).await? {
        Standing::Waiting { due, last } if !until.has_passed() => (due, last),
        standing => return Ok(standing.place()),
    };
    // A little after the lease's end, so that the server finds it expired.
    let due = due + Duration::from_millis(1);
    let due = if listens { due } else { due.min(POLL) };
    let look = look_by(until).min(BootTime::now() + due);
    waiter.waits(last, look);
    tokio::select! {
        () = waiter.woken.notified() => {}
        () = sync::sleep_until(look) => {}
    }
    if let Some(sequence) = waiter.granted() {
        return Ok(Place::Held { sequence });
    }
    Ok(standing(client, ticket).await?.place())
}

/// The place of a claim.
enum Standing {
    /// It holds, or it is gone.
    At(Place),
    /// It waits. `due` is the time until a lease ahead of it ends, `last` the line's last token.
    Waiting { due: Duration, last: u64 },
}

impl Standing {
    fn place(self) -> Place {
        match self {
            Self::At(place) => place,
            Self::Waiting { .. } => Place::Waiting,
        }
    }
}

async fn standing(client: &Client, ticket: &Ticket) -> Result<Standing> {
    let (name, claim) = (ticket.name.as_str(), ticket.claim.to_string());
    let parameters: Parameters<'_> = &[&client.namespace, &name, &claim];
    let answer = client.numbers("wait", Verb::Place, parameters).await?;
    match *answer.as_slice() {
        [0] => Ok(Standing::At(Place::Gone)),
        [1, sequence] => Ok(Standing::At(held(sequence))),
        [2, due, last] => Ok(Standing::Waiting {
            due: from_micros(due),
            last: last.unsigned_abs(),
        }),
        _ => error::unreadable("wait"),
    }
}
