//! Renewing: many leases in one round trip, each with a script call of its own, because lines
//! may be in different hash slots, and a failure of one is no other's.

use std::time::Duration;

use redis::{Pipeline, RedisResult};

use super::client::{Client, Script, addressed, nonsense};
use super::connection::Connection;
use super::error::{fault, is_broken, is_no_script};
use super::keys::LineKeys;
use crate::core::clock::BootTime;
use crate::core::engine::Renewal;
use crate::core::error::{Error, ErrorKind, Result};
use crate::core::ticket::{Lease, LeaseStart, Ticket};
use crate::engines::kit::{Link, timed};

type Answers = Vec<RedisResult<String>>;

impl Client {
    pub(in crate::engines) async fn renew(&self, leases: Vec<Lease>, within: Duration) -> Vec<Renewal> {
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
        let (link, answers) = match self.renew_within(&known, within).await {
            Ok(answered) => answered,
            Err(error) => {
                let unknown = |_| Renewal::Unknown(error.clone().maybe_applied());
                return leases.iter().map(unknown).collect();
            }
        };
        let mut answers = answers.into_iter();
        let mut renewals = Vec::with_capacity(asked.len());
        for line in &asked {
            let Some((ticket, _)) = line else {
                renewals.push(Renewal::Lost);
                continue;
            };
            renewals.push(match answers.next() {
                Some(Ok(answer)) => match addressed(ticket.claim, &answer) {
                    Some(word) => renewal(word, sent),
                    None => Renewal::Unknown(self.misled("renew", &link).await),
                },
                Some(Err(error)) => Renewal::Unknown(fault("renew", &error)),
                None => Renewal::Unknown(nonsense("renew")),
            });
        }
        renewals
    }

    /// Asks for all of them. A connection on which the answers do not come in time is given up at
    /// once: the next renewal can still be in time on another.
    async fn renew_within(
        &self,
        known: &[&(Ticket, LineKeys)],
        within: Duration,
    ) -> Result<(Link<Connection>, Answers)> {
        let start = BootTime::now();
        let link = timed("renew", within, self.link()).await??;
        let left = within.saturating_sub(BootTime::now().saturating_since(start));
        let asking = async {
            let answers = self.renew_all(&link, known).await?;
            self.replicated("renew", &link).await?;
            Ok(answers)
        };
        match timed("renew", left, asking).await {
            Ok(Ok(answers)) => Ok((link, answers)),
            Ok(Err(error)) => Err(error),
            Err(late) => {
                self.links.broken(&link).await;
                Err(late)
            }
        }
    }

    async fn renew_all(
        &self,
        link: &Link<Connection>,
        known: &[&(Ticket, LineKeys)],
    ) -> Result<Answers> {
        let mut connection = link.connection.multiplexed.clone();
        let mut pipeline = Pipeline::with_capacity(known.len());
        pipeline.ignore_errors();
        let hash = link.connection.hash(Script::Renew);
        for (ticket, keys) in known {
            pipeline.cmd("EVALSHA").arg(hash).arg(2);
            pipeline.arg(&keys.key).arg(&keys.state);
            pipeline.arg(ticket.claim.to_string()).arg(ticket.sequence);
        }
        let mut answered = pipeline.query_async::<Answers>(&mut connection).await;
        let forgotten = |answers: &Answers| {
            let mut failed = answers.iter().filter_map(|answer| answer.as_ref().err());
            failed.any(is_no_script)
        };
        if answered.as_ref().is_ok_and(forgotten) {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(Script::Renew.source());
            let loaded: RedisResult<String> = load.query_async(&mut connection).await;
            loaded.map_err(|error| fault("renew", &error))?;
            // Those that were renewed before the server forgot are renewed once more.
            answered = pipeline.query_async(&mut connection).await;
        }
        let broken = match &answered {
            Ok(answers) => answers
                .iter()
                .filter_map(|a| a.as_ref().err())
                .any(is_broken),
            Err(error) => is_broken(error),
        };
        if broken {
            self.links.broken(link).await;
        }
        answered.map_err(|error| fault("renew", &error))
    }
}

/// What the script's word for one lease means.
fn renewal(word: &str, sent: BootTime) -> Renewal {
    match (word, word.parse()) {
        ("lost", _) => Renewal::Lost,
        ("evicted", _) => Renewal::Evicted,
        (_, Ok(ttl)) => Renewal::Held(LeaseStart {
            sent,
            ttl: Duration::from_millis(ttl),
        }),
        _ => {
            let message = "the records of this line can't be used";
            Renewal::Unknown(Error::new(ErrorKind::Unusable, "renew", message))
        }
    }
}
