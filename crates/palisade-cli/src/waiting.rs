//! What people are told while they wait: who holds the lock, or what else is in the way.
//!
//! A reason besides other claims, such as an engine that does not answer, comes from the library as
//! [`events::Event::Stalled`]. Each is told once for a wait, whatever numbers it contains.

use std::time::Duration;

use palisade::events;
use palisade::{Client, Error, ErrorKind, Name, Patience};
use serde_json::json;
use tokio::sync::watch;

use crate::exit::{Failure, told};
use crate::holder::owners_above;
use crate::job::{Job, held_by};
use crate::lineage;
use crate::verbs::look;
use crate::view::{ClaimView, shown};

/// Shorter waits are not worth a line on stderr.
pub(crate) const NOTICE_AFTER: Duration = Duration::from_millis(100);

/// The pause before asking again who holds the lock, if the engine did not answer.
const NOTICE_AGAIN: Duration = Duration::from_secs(1);

/// An engine that takes longer to say who holds the lock is what is waited for.
const SLOW: Duration = Duration::from_secs(2);

/// How many reasons are told of one wait.
const REASONS: usize = 8;

/// No wait is this long.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

impl Job {
    /// Reports what is waited for if the wait takes long: the holders of the lock, or what else is in
    /// the way. Returns if the wait would never end.
    pub(crate) async fn watch_the_wait(
        &self,
        client: &Client,
        patience: Patience,
        mut stalls: watch::Receiver<Option<Error>>,
    ) -> Failure {
        tokio::time::sleep(NOTICE_AFTER).await;
        let mut ancestors = lineage::owners();
        ancestors.extend(owners_above().await);
        if patience == Patience::NoWait {
            ancestors.clear();
        }
        let mut said = Said {
            holders: self.quiet,
            ..Said::default()
        };
        loop {
            let why = stalls.borrow_and_update().clone();
            let away = why.as_ref().filter(|why| why.is_transient());
            if let Some(away) = away {
                self.complain_anew(away, &mut said);
            }
            // Of no use while the engine is away.
            let unseen = !said.holders || !said.looked && !ancestors.is_empty();
            if unseen && away.is_none() {
                let line = tokio::time::timeout(SLOW, look(client, &self.name)).await;
                let line = match line {
                    Ok(Ok(line)) => Some(line),
                    Ok(Err(Failure::Library(error))) if error.is_transient() => {
                        self.complain_anew(&error, &mut said);
                        None
                    }
                    Ok(Err(_)) => None,
                    Err(_) => {
                        let message = format!(
                            "it has not answered for {SLOW:?}; is it overloaded, frozen or cut off?"
                        );
                        let slow = Error::new(ErrorKind::Unreachable, "survey", message);
                        self.complain_anew(&slow, &mut said);
                        None
                    }
                };
                said.looked = line.is_some();
                let line = line.flatten();
                let futile = line
                    .as_ref()
                    .and_then(|line| self.futile(line, &ancestors, true));
                if let Some(futile) = futile {
                    return futile;
                }
                let known = said.looked || said.reasons.is_empty();
                if known && !std::mem::replace(&mut said.holders, true) {
                    let holders = line.map_or_else(Vec::new, |line| line.holders);
                    self.say_waiting(&holders, why.as_ref());
                    said.reasons.extend(why.as_ref().map(words));
                }
            }
            if let Some(why) = why.filter(|why| !why.is_transient() && said.is_new(why)) {
                self.say_waiting(&[], Some(&why));
            }
            let done = said.holders && (said.looked || ancestors.is_empty());
            let again = if done { NEVER } else { NOTICE_AGAIN };
            if let Ok(Err(_)) = tokio::time::timeout(again, stalls.changed()).await {
                // The client is gone, and with it the wait.
                return std::future::pending().await;
            }
        }
    }

    /// Reports a reason to wait for the engine, unless it was reported before.
    fn complain_anew(&self, error: &Error, said: &mut Said) {
        if said.is_new(error) {
            self.complain(error);
        }
    }

    pub(crate) fn complain(&self, error: &Error) {
        if self.quiet {
            return;
        }
        let message = told(error);
        self.printer.event(
            json!({"event": "unreachable", "name": self.name.as_str(), "message": message}),
            || Some(format!("waiting for the engine: {message}")),
        );
    }

    fn say_waiting(&self, holders: &[ClaimView], why: Option<&Error>) {
        if self.quiet {
            return;
        }
        let why = why.map(|why| why.message());
        let event = json!({
            "event": "waiting",
            "name": self.name.as_str(),
            "holders": holders,
            "message": why,
        });
        self.printer.event(event, || {
            let held = held_by(holders).map_or_else(String::new, |held| format!(", {held}"));
            let why = why.map_or_else(String::new, |why| format!(": {why}"));
            Some(format!(
                "waiting for {}{held}{why}",
                shown(self.name.as_str())
            ))
        });
    }
}

/// Passes on what the job waits for besides its turn.
pub(crate) struct Stalls {
    name: Name,
    stalls: watch::Sender<Option<Error>>,
}

impl Stalls {
    /// An observer for the line `name`, and where it says what is waited for.
    pub(crate) fn of(name: &Name) -> (Self, watch::Receiver<Option<Error>>) {
        let (stalls, stalled) = watch::channel(None);
        let name = name.clone();
        (Self { name, stalls }, stalled)
    }
}

impl events::Observer for Stalls {
    fn see(&self, event: &events::Event<'_>) {
        let why = match event {
            events::Event::Stalled { name, why, .. } if **name == self.name => why.cloned(),
            events::Event::Acquired { name, .. } if **name == self.name => None,
            _ => return,
        };
        self.stalls.send_replace(why);
    }
}

/// What was said about one wait.
#[derive(Default)]
pub(crate) struct Said {
    /// Whether the line was seen.
    looked: bool,
    /// Whether its holders were named.
    holders: bool,
    /// The reasons that were told.
    reasons: Vec<String>,
}

impl Said {
    /// Whether this reason was not told yet. Many are as good as none: people have seen enough.
    pub(crate) fn is_new(&mut self, why: &Error) -> bool {
        let words = words(why);
        let new = self.reasons.len() < REASONS && !self.reasons.contains(&words);
        if new {
            self.reasons.push(words);
        }
        new
    }
}

/// A message without its numbers, some of which say how long it still takes.
fn words(why: &Error) -> String {
    let message = why.message().chars();
    message.filter(|c| !c.is_ascii_digit()).collect()
}
