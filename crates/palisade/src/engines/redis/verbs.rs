//! The verbs on one claim: enter, wait, renew, amend, leave, evict.

use std::time::Duration;

use redis::Cmd;

use super::keys::LineKeys;
use super::scripts::Script;
use super::store::Store;
use super::wire::Wire;
use crate::core::claim::{Ask, Claim};
use crate::core::clock::BootTime;
use crate::core::engine::{Amended, Amendment, Entered, Eviction, Left, Place, Renewal};
use crate::core::error::{Error, Kind, Result};
use crate::core::line::capacity_mismatch;
use crate::core::name::Name;
use crate::core::sync;
use crate::core::ticket::{Armed, Lease, Ticket};
use crate::engines::remote::Link;

/// How long a claim that was left before it arrived is remembered: far longer than a request can
/// be under way, short enough that the memory stays small.
const TOMBSTONE: Duration = Duration::from_secs(300);

/// A push can be lost, and a server can freeze without a word: a waiter looks at least this often.
const RECHECK: Duration = Duration::from_secs(1);

/// Weight and capacity as the scripts count: the whole line is 0 of 0.
fn numbers(ask: Ask) -> (u32, u32) {
    match ask {
        Ask::Whole => (0, 0),
        Ask::Part { weight, capacity } => (weight, capacity),
    }
}

/// Where a claim stands, as a script answers.
struct Standing {
    place: Place,
    /// What is left of its lease.
    left: Duration,
    /// When it should look again.
    due: Duration,
}

impl Standing {
    /// Reads `{place, token, lease left, look again in}`, times in microseconds.
    fn read(operation: &'static str, answer: &[String]) -> Result<Self> {
        let numbers = |text: &[String]| -> Option<[u64; 3]> {
            let [token, left, due] = text else {
                return None;
            };
            Some([token.parse().ok()?, left.parse().ok()?, due.parse().ok()?])
        };
        let read = answer.split_first().and_then(|(word, rest)| {
            let place = |counted| match word.as_str() {
                "held" => Some(Place::Held { counted }),
                "waiting" => Some(Place::Waiting),
                _ => None,
            };
            let [counted, left, due] = numbers(rest)?;
            Some(Self {
                place: place(counted)?,
                left: Duration::from_micros(left),
                due: Duration::from_micros(due),
            })
        });
        read.ok_or_else(|| {
            let message = "the server's answer makes no sense";
            Error::new(Kind::Unusable, operation, message).maybe_applied()
        })
    }
}

impl Store {
    pub(super) async fn enter(&self, claim: &Claim) -> Result<Entered> {
        let keys = self.keys.line(&claim.name)?;
        let link = self.link().await?;
        // Before the claim is in the line: the push that grants it must find the bell.
        let bell = match claim.queue {
            true => {
                self.hear(&link).await?;
                Some(self.hub.bell(claim.id))
            }
            false => None,
        };
        let (weight, capacity) = numbers(claim.ask);
        let mut rest = claim.owner.to_json();
        if let Some(value) = &claim.value {
            rest = format!("{rest}\n{value}");
        }
        let arguments = |command: &mut Cmd| {
            command
                .arg(self.keys.changes())
                .arg(claim.id.to_string())
                .arg(weight)
                .arg(capacity)
                .arg(claim.ttl.as_millis() as u64)
                .arg(u8::from(claim.queue))
                .arg(&self.hub.channel)
                .arg(&rest)
                .arg(u8::from(self.target.replicas > 0));
        };
        let sent = BootTime::now();
        let answer: Result<Vec<String>> = self
            .run("enter", &link, Script::Enter, &[&keys], arguments)
            .await;
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Err(error),
        };
        match answer.first().map(String::as_str) {
            Some("busy") => {
                self.hub.forget(claim.id);
                return Ok(Entered::Busy);
            }
            Some("mismatch") => {
                self.hub.forget(claim.id);
                let live = answer.get(1).and_then(|live| live.parse().ok());
                return Err(capacity_mismatch(live.unwrap_or_default(), capacity));
            }
            _ => {}
        }
        let standing = Standing::read("enter", &answer)?;
        let counted = match standing.place {
            Place::Held { counted } => counted,
            Place::Waiting | Place::Gone => 0,
        };
        match (&bell, counted) {
            (Some(bell), 0) => bell.set_due(sent + standing.due),
            _ => self.hub.forget(claim.id),
        }
        let ticket = Ticket {
            counted,
            ..Ticket::own(claim.name.clone(), claim.id)
        };
        if counted != 0
            && let Err(error) = self.replicated("enter", &link).await
        {
            // Nobody may hold what a failover would forget.
            self.leave(&ticket).await.map_err(Error::maybe_applied)?;
            return Err(error);
        }
        Ok(Entered::In {
            ticket,
            armed: Armed {
                sent,
                ttl: standing.left,
            },
            place: standing.place,
        })
    }

    pub(super) async fn wait(&self, ticket: &Ticket, until: BootTime) -> Result<Place> {
        let keys = self.keys.line(&ticket.name)?;
        let bell = self.hub.bell(ticket.claim);
        loop {
            let link = self.link().await?;
            self.hear(&link).await?;
            let look_at = bell.due().min(until).min(BootTime::now() + RECHECK);
            if !look_at.has_passed() {
                tokio::select! {
                    biased;
                    () = bell.rung.notified() => {}
                    () = sync::sleep_until(look_at) => {}
                }
            }
            let Some(standing) = self.look(&keys, ticket).await? else {
                self.hub.forget(ticket.claim);
                return Ok(Place::Gone);
            };
            match standing.place {
                Place::Waiting => bell.set_due(BootTime::now() + standing.due),
                place => {
                    self.hub.forget(ticket.claim);
                    return Ok(place);
                }
            }
            if until.has_passed() {
                return Ok(Place::Waiting);
            }
        }
    }

    /// Subscribes this runtime's connection to grants, once.
    async fn hear(&self, link: &Link<Wire>) -> Result<()> {
        let hear = link.connection.hear_wakes(&self.hub);
        let heard = tokio::time::timeout(self.timeout, hear).await;
        let error = match heard {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => {
                let message = format!("no answer within {:?}", self.timeout);
                Error::new(Kind::Unreachable, "subscribe", message)
            }
        };
        if error.kind() == Kind::Unreachable {
            self.links.broken(link).await;
        }
        // Nothing was asked for yet.
        Err(Error::new(error.kind(), "subscribe", error.message()))
    }

    /// Where a claim stands; `None` when it is not in the line.
    async fn look(&self, keys: &LineKeys, ticket: &Ticket) -> Result<Option<Standing>> {
        let link = self.link().await?;
        let arguments = |command: &mut Cmd| {
            command
                .arg(self.keys.changes())
                .arg(ticket.claim.to_string())
                .arg(u8::from(self.target.replicas > 0));
        };
        let answer: Vec<String> = self
            .run("wait", &link, Script::Look, &[keys], arguments)
            .await?;
        if answer.first().is_some_and(|word| word == "gone") {
            return Ok(None);
        }
        let standing = Standing::read("wait", &answer)?;
        if standing.place != Place::Waiting {
            self.replicated("wait", &link).await?;
        }
        Ok(Some(standing))
    }

    pub(super) async fn renew(&self, leases: Vec<Lease>) -> Vec<Renewal> {
        // Shared leases, and names that can't be keys, were never given out by this engine.
        let line = |lease: &Lease| {
            let ticket = lease.ticket.clone()?;
            let keys = self.keys.line(&ticket.name).ok()?;
            Some((ticket, keys))
        };
        let asked: Vec<_> = leases.iter().map(line).collect();
        let known: Vec<_> = asked.iter().flatten().collect();
        if known.is_empty() {
            return leases.iter().map(|_| Renewal::Lost).collect();
        }
        let sent = BootTime::now();
        let mut answers = match self.renew_known(&known).await {
            Ok(answers) => answers.into_iter(),
            Err(error) => {
                let unknown = || Error::new(error.kind(), "renew", error.message()).maybe_applied();
                return leases.iter().map(|_| Renewal::Unknown(unknown())).collect();
            }
        };
        let renewal = |line: &Option<_>| match line {
            None => Renewal::Lost,
            Some(_) => match answers.next().as_deref() {
                Some("lost") => Renewal::Lost,
                Some("evicted") => Renewal::Evicted,
                answer => match answer.and_then(|ttl| ttl.parse().ok()) {
                    Some(ttl) => Renewal::Held(Armed {
                        sent,
                        ttl: Duration::from_millis(ttl),
                    }),
                    None => {
                        let message = "the records of this line can't be used";
                        Renewal::Unknown(Error::new(Kind::Unusable, "renew", message))
                    }
                },
            },
        };
        asked.iter().map(renewal).collect()
    }

    async fn renew_known(&self, known: &[&(Ticket, LineKeys)]) -> Result<Vec<String>> {
        let link = self.link().await?;
        let lines: Vec<&LineKeys> = known.iter().map(|(_, keys)| keys).collect();
        let arguments = |command: &mut Cmd| {
            command.arg(self.keys.changes());
            for (ticket, _) in known {
                command.arg(ticket.claim.to_string()).arg(ticket.counted);
            }
        };
        let answers = self
            .run("renew", &link, Script::Renew, &lines, arguments)
            .await?;
        self.replicated("renew", &link).await?;
        Ok(answers)
    }

    pub(super) async fn amend(&self, ticket: &Ticket, amendment: &Amendment) -> Result<Amended> {
        let keys = self.keys.line(&ticket.name)?;
        let link = self.link().await?;
        let arguments = |command: &mut Cmd| {
            command
                .arg(self.keys.changes())
                .arg(ticket.claim.to_string())
                .arg(ticket.counted);
            match amendment {
                Amendment::Value(value) => command.arg("value").arg(value),
                Amendment::Ask(ask) => {
                    let (weight, capacity) = numbers(*ask);
                    command.arg("ask").arg(weight).arg(capacity)
                }
            };
        };
        let answer: String = self
            .run("amend", &link, Script::Amend, &[&keys], arguments)
            .await?;
        Ok(match answer.as_str() {
            "done" => {
                self.replicated("amend", &link).await?;
                Amended::Done
            }
            "busy" => Amended::Busy,
            _ => Amended::Gone,
        })
    }

    pub(super) async fn leave(&self, ticket: &Ticket) -> Result<Left> {
        self.hub.forget(ticket.claim);
        let keys = self.keys.line(&ticket.name)?;
        let link = self.link().await?;
        let arguments = |command: &mut Cmd| {
            command
                .arg(self.keys.changes())
                .arg(ticket.claim.to_string())
                .arg(ticket.counted)
                .arg(u8::from(ticket.in_doubt))
                .arg(TOMBSTONE.as_millis() as u64);
        };
        let left: bool = self
            .run("leave", &link, Script::Leave, &[&keys], arguments)
            .await?;
        Ok(if left { Left::Done } else { Left::Absent })
    }

    pub(super) async fn evict(&self, name: &Name, id: &str, eviction: Eviction) -> Result<bool> {
        let keys = self.keys.line(name)?;
        let link = self.link().await?;
        let how = match eviction {
            Eviction::Mark => "mark",
            Eviction::Remove => "remove",
        };
        let arguments = |command: &mut Cmd| {
            let id = super::survey::foreign_value(id);
            command.arg(self.keys.changes()).arg(id).arg(how);
        };
        let answer: String = self
            .run("evict", &link, Script::Evict, &[&keys], arguments)
            .await?;
        match answer.as_str() {
            "done" => Ok(true),
            "foreign" => Err(Error::new(
                Kind::Unsupported,
                "evict",
                "another tool holds this lock and can't be asked to let go; it can only be removed by force",
            )),
            _ => Ok(false),
        }
    }
}
