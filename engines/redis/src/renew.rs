//! Renews many leases in one round trip. Each lease has its own script call, because lines may be
//! in different hash slots, and so that one failure does not affect the others.

use std::time::Duration;

use futures_util::future::join_all;
use redis::{Cmd, Pipeline, RedisError, RedisResult};

use super::client::{Client, Script, Servers, addressed, unexpected_reply};
use super::connection::Connection;
use super::error::{fault, is_broken, is_no_script};
use super::keys::LineKeys;
use palisade_core::engine::{Lease, LeaseStart, Renewal, Ticket};
use palisade_core::{BootTime, Error, ErrorKind, Result};
use palisade_kit::{Link, timed};

type Answers = Vec<RedisResult<String>>;

impl Client {
    pub(crate) async fn renew(&self, leases: &[Lease], within: Duration) -> Vec<Renewal> {
        // This engine never issued shared leases, or tickets whose names have no key.
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
        let mut answers = self.renew_within(&known, within).await.into_iter();
        let answer = |line: &Option<_>| match line {
            None => Renewal::Lost,
            Some(_) => match answers.next() {
                Some(Ok(word)) => renewal(&word, sent),
                Some(Err(error)) => Renewal::Unknown(error.maybe_applied()),
                None => Renewal::Unknown(unexpected_reply("renew")),
            },
        };
        asked.iter().map(answer).collect()
    }

    /// Renews all of them, in one pipeline per server. A connection that does not answer in time is
    /// dropped at once, so that the next renewal can still make it on a new one.
    async fn renew_within(
        &self,
        known: &[&(Ticket, LineKeys)],
        within: Duration,
    ) -> Vec<Result<String>> {
        let start = BootTime::now();
        let linking = join_all(known.iter().map(|(_, keys)| self.link(Some(keys))));
        let links = match timed("renew", within, linking).await {
            Ok(links) => links,
            Err(late) => return known.iter().map(|_| Err(late.clone())).collect(),
        };
        let mut answers: Vec<Option<Result<String>>> = known.iter().map(|_| None).collect();
        let mut groups: Vec<(Link<Connection>, Vec<usize>)> = Vec::new();
        for (at, link) in links.into_iter().enumerate() {
            let link = match link {
                Ok(link) => link,
                Err(error) => {
                    answers[at] = Some(Err(error));
                    continue;
                }
            };
            let host = link.connection.host();
            match groups
                .iter_mut()
                .find(|(of, _)| of.connection.host() == host)
            {
                Some((_, group)) => group.push(at),
                None => groups.push((link, vec![at])),
            }
        }
        let left = within.saturating_sub(BootTime::now().saturating_since(start));
        let renewals = groups.iter().map(|(link, group)| async move {
            let lines: Vec<_> = group.iter().map(|at| known[*at]).collect();
            let asking = async {
                let answers = self.renew_all(link, &lines).await?;
                self.replicated("renew", link).await?;
                Ok::<_, Error>(self.words(link, &lines, answers).await)
            };
            match timed("renew", left, asking).await {
                Ok(Ok(answers)) => answers,
                Ok(Err(error)) => lines.iter().map(|_| Err(error.clone())).collect(),
                Err(late) => {
                    self.servers.broken(link).await;
                    lines.iter().map(|_| Err(late.clone())).collect()
                }
            }
        });
        for ((_, group), renewals) in groups.iter().zip(join_all(renewals).await) {
            for (at, renewal) in group.iter().zip(renewals) {
                answers[*at] = Some(renewal);
            }
        }
        let unanswered = || Err(unexpected_reply("renew"));
        answers
            .into_iter()
            .map(|a| a.unwrap_or_else(unanswered))
            .collect()
    }

    /// The reply for each lease. A lease whose line has moved is renewed on its new server.
    async fn words(
        &self,
        link: &Link<Connection>,
        lines: &[&(Ticket, LineKeys)],
        answers: Answers,
    ) -> Vec<Result<String>> {
        let mut words = Vec::with_capacity(lines.len());
        for ((ticket, keys), answer) in lines.iter().zip(answers) {
            let id = ticket.claim.to_string();
            words.push(match answer {
                Ok(answer) => match addressed(&id, &answer) {
                    Some(word) => Ok(word.to_owned()),
                    None => Err(self.misled("renew", link).await),
                },
                Err(_) if matches!(self.servers, Servers::Cluster(_)) => {
                    let (mut link, sequence) = (link.clone(), ticket.sequence);
                    let arguments = |command: &mut Cmd| {
                        command.arg(&id).arg(sequence);
                    };
                    self.run_for(&mut link, Script::Renew, keys, &id, arguments)
                        .await
                }
                Err(error) => Err(fault("renew", &error)),
            });
        }
        words
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
        if any_failed(&answered, is_no_script) {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(Script::Renew.source());
            let loaded: RedisResult<String> = load.query_async(&mut connection).await;
            loaded.map_err(|error| fault("renew", &error))?;
            // Leases that were renewed before the server lost the script are renewed twice; that is
            // harmless.
            answered = pipeline.query_async(&mut connection).await;
        }
        if any_failed(&answered, is_broken) {
            self.servers.broken(link).await;
        }
        let answered = self.judged("renew", link, Ok(answered)).await?;
        answered.map_err(|error| fault("renew", &error))
    }
}

/// Whether the server has answered, and one of its answers is such an error.
fn any_failed(answered: &RedisResult<Answers>, is_such: impl Fn(&RedisError) -> bool) -> bool {
    let answers = answered.iter().flatten();
    answers
        .filter_map(|answer| answer.as_ref().err())
        .any(is_such)
}

/// Translates the script's reply for one lease.
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
