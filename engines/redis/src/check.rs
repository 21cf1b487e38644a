//! `check`: findings about a server that could break exclusion, tokens or wake-ups.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::try_join_all;
use redis::RedisResult;
use redis::aio::MultiplexedConnection;

use super::client::Client;
use super::connection::Connection;
use super::error::fault;
use super::notify::wake_channel;
use palisade_core::engine::unix_time;
use palisade_core::report::{Checkup, Finding, Severity};
use palisade_core::{BootTime, Result};
use palisade_kit::{Host, Link, clock_off, plain_text, timed};

/// The oldest version that has every command that the engine uses.
const OLDEST: (u32, u32) = (6, 2);

impl Client {
    pub(crate) async fn check(&self) -> Result<Checkup> {
        let links = self.links().await?;
        let checkups = try_join_all(links.iter().map(|link| self.check_server(link))).await?;
        let mut whole = match <[Checkup; 1]>::try_from(checkups) {
            Ok([one]) => one,
            Err(several) => {
                let hosts = links.iter().map(|link| link.connection.host().clone());
                merged(hosts.zip(several.into_iter().map(Some)))
            }
        };
        if let Some(sentinel) = self.servers.sentinel() {
            let mut ahead: Vec<i64> = whole.clock_ahead_us.into_iter().collect();
            for replica in sentinel.replicas().await {
                let asking = async {
                    let (mut connection, _driver) = replica.connect(|_| ()).await.ok()?;
                    clock_ahead(&mut connection).await.ok()
                };
                let limit = self.servers.connect_timeout();
                ahead.extend(tokio::time::timeout(limit, asking).await.ok().flatten());
            }
            whole.findings.extend(clocks_apart(&ahead));
        }
        let (hosts, encrypted) = self.servers.named();
        whole.findings.extend(plain_text(&hosts, encrypted));
        Ok(whole)
    }

    async fn check_server(&self, link: &Link<Connection>) -> Result<Checkup> {
        let info = self.info(link).await?;
        let mut connection = link.connection.multiplexed.clone();
        let ahead = timed("check", self.timeout, clock_ahead(&mut connection)).await?;
        let ahead = ahead.map_err(|error| fault("check", &error))?;
        let said = |key: &str| info.get(key).map(String::as_str).unwrap_or_default();
        let number = |key: &str| said(key).parse::<u64>().unwrap_or(0);

        let version = match info.get("valkey_version") {
            Some(version) => format!("Valkey {version}"),
            None => format!("Redis {}", said("redis_version")),
        };
        let mut findings = Vec::new();
        findings.extend(clock_off(ahead));
        if is_old(said("redis_version")) {
            findings.push(Finding::new(
                Severity::Warning,
                "old_version",
                "this server is older than Redis 6.2 and lacks commands that locks need",
                "use Redis 6.2 or newer, or Valkey",
            ));
        }
        let policy = said("maxmemory_policy");
        if policy != "noeviction" && !policy.is_empty() {
            let severity = match number("maxmemory") {
                0 => Severity::Warning,
                _ => Severity::Danger,
            };
            findings.push(Finding::new(
                severity,
                "eviction",
                format!("maxmemory-policy is {policy}: when memory runs out, held locks are evicted and granted again"),
                "set maxmemory-policy noeviction, or keep locks in a server of their own",
            ));
        }
        if said("role") == "slave" {
            findings.push(Finding::new(
                Severity::Warning,
                "replica",
                "this server is a replica: it takes no locks",
                "name the primary in the URL",
            ));
        } else if number("connected_slaves") > 0
            && !info.contains_key("min_slaves_good_slaves")
            && self.replicas == 0
        {
            findings.push(Finding::new(
                Severity::Danger,
                "unsafe_failover",
                "there are replicas, but a grant need not reach any of them: after a failover it may be granted again",
                "set min-replicas-to-write 1 and min-replicas-max-lag, and use the option replicas=1",
            ));
        }
        findings.extend(self.persistence(link, number("aof_enabled") == 1).await?);
        findings.extend(self.channels(link).await?);
        Ok({
            let mut checkup = Checkup::default();
            checkup.version = Some(version);
            checkup.clock_ahead_us = Some(ahead);
            checkup.findings = findings;
            checkup
        })
    }

    async fn info(&self, link: &Link<Connection>) -> Result<HashMap<String, String>> {
        let text: RedisResult<String> = self.ask("check", link, &redis::cmd("INFO")).await?;
        let text = text.map_err(|error| fault("check", &error))?;
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        Ok(pairs
            .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
            .collect())
    }

    /// Warns if a restart of the server forgets who holds.
    async fn persistence(&self, link: &Link<Connection>, aof: bool) -> Result<Option<Finding>> {
        let mut get = redis::cmd("CONFIG");
        get.arg("GET").arg("save");
        let save: RedisResult<HashMap<String, String>> = self.ask("check", link, &get).await?;
        // Hosted servers often refuse CONFIG; then snapshots are assumed.
        let snapshots = save.map_or(true, |save| save.values().any(|save| !save.is_empty()));
        let found = match (aof, snapshots) {
            (true, _) => return Ok(None),
            (false, true) => Finding::new(
                Severity::Info,
                "snapshots_only",
                "the server keeps snapshots but no append-only file: a crash forgets the latest grants",
                "set appendonly yes, or rely on the fence",
            ),
            (false, false) => Finding::new(
                Severity::Danger,
                "no_persistence",
                "the server keeps nothing on disk: a restart forgets who holds, and grants again",
                "set appendonly yes, or rely on the fence",
            ),
        };
        Ok(Some(found))
    }

    /// Warns if this user may not publish wake-ups.
    async fn channels(&self, link: &Link<Connection>) -> Result<Option<Finding>> {
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(wake_channel(&self.hub)).arg("");
        let published: RedisResult<i64> = self.ask("check", link, &publish).await?;
        let denied = published.is_err_and(|error| error.code() == Some("NOPERM"));
        Ok(denied.then(|| {
            Finding::new(
                Severity::Warning,
                "no_channels",
                "this user may not use the channels palisade:*, so waiters are not woken and have to poll",
                "give the user the rights &palisade:* +publish +subscribe",
            )
        }))
    }
}

/// How far a server's clock is ahead of ours, in microseconds, measured at the middle of the
/// request.
async fn clock_ahead(connection: &mut MultiplexedConnection) -> RedisResult<i64> {
    let began = BootTime::now();
    let (seconds, micros): (i64, i64) = redis::cmd("TIME").query_async(connection).await?;
    let took = BootTime::now().saturating_since(began);
    let here = unix_time().as_micros() as i64;
    Ok(seconds * 1_000_000 + micros - (here - took.as_micros() as i64 / 2))
}

/// With clocks further apart than this, tokens or leases are unsafe.
const APART: Duration = Duration::from_secs(1);

/// Warns if the servers' clocks differ: a lock that moves between servers depends on both.
pub(crate) fn clocks_apart(ahead_us: &[i64]) -> Option<Finding> {
    let (least, most) = (ahead_us.iter().min()?, ahead_us.iter().max()?);
    let apart = Duration::from_micros((most - least).unsigned_abs());
    (apart > APART).then(|| {
        let message = format!("the clocks of the servers are {apart:.1?} apart");
        Finding::new(
            Severity::Danger,
            "clocks_apart",
            &message,
            "run NTP on all of them; tokens rest on the clock after a failover, and leases always",
        )
    })
}

/// The findings of several servers, each prefixed with its host; `None` is a server that did not
/// answer.
pub(crate) fn merged(servers: impl Iterator<Item = (Host, Option<Checkup>)>) -> Checkup {
    let (mut whole, mut ahead) = (Checkup::default(), Vec::new());
    for (host, checkup) in servers {
        let Some(checkup) = checkup else {
            whole.findings.push(Finding::new(
                Severity::Warning,
                "server_down",
                format!("{host} does not answer: fewer others may fail"),
                "start it, or replace it in the URL of all clients at once",
            ));
            continue;
        };
        whole.version = whole.version.or(checkup.version);
        ahead.extend(checkup.clock_ahead_us);
        let findings = checkup.findings.into_iter().map(|mut finding| {
            finding.message = format!("{host}: {}", finding.message);
            finding
        });
        whole.findings.extend(findings);
    }
    whole.findings.extend(clocks_apart(&ahead));
    // The median, so that one wrong clock does not count.
    ahead.sort_unstable();
    whole.clock_ahead_us = ahead.get(ahead.len() / 2).copied();
    whole
}

fn is_old(version: &str) -> bool {
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor) = (numbers.next().flatten(), numbers.next().flatten());
    match (major, minor) {
        (Some(major), Some(minor)) => (major, minor) < OLDEST,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_told_from_new_ones() {
        for (version, old) in [
            ("5.0.14", true),
            ("6.0.16", true),
            ("6.2.0", false),
            ("7.0.15", false),
            ("10.1.0", false),
            ("", false),
        ] {
            assert_eq!(is_old(version), old, "{version}");
        }
    }
}
