//! `survey`, `watch` and `check`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;

use super::FileEngine;
use super::acquire::sleep_on;
use super::boot::LINES;
use super::config::Audience;
use super::dir::{self, not_local};
use super::error::{busy, file_failed};
use super::keys;
use super::line_file::{Extra, LineFile, Lock, State};
use super::notify::Sleeper;
use super::store::Store;
use super::tx::{self, Looked, Sleep, Suspects, Tx};
use palisade_core::engine::{BoxStream, Seat};
use palisade_core::report::{Checkup, Finding, LineReport, Scope, Severity};
use palisade_core::{BootTime, Result};

pub(super) async fn survey(engine: &FileEngine, scope: &Scope) -> Result<Vec<LineReport>> {
    Ok(look(engine, scope).await?.0)
}

/// The lines in a scope, and what a watch of it sleeps on.
async fn look(engine: &FileEngine, scope: &Scope) -> Result<(Vec<LineReport>, Sleep)> {
    let (store, namespace, timeout) = (&*engine.store, &*engine.namespace, engine.timeout);
    tx::refuse_fork(store, "survey")?;
    let home = store.home();
    let mut files = match scope {
        Scope::Line(name) => vec![keys::file_name(namespace, name.as_str())],
        Scope::Prefix(_) => {
            dir::names(&home.lines).map_err(|errno| file_failed("survey", &home.dir.path, errno))?
        }
    };
    files.retain(|file| keys::may_include(namespace, scope, file));
    let mut reports = Vec::new();
    let mut seats = Vec::new();
    for file in files {
        let path = || home.dir.path.join(LINES).join(&file);
        let opened = LineFile::open(home, &file);
        let opened = opened.map_err(|errno| file_failed("survey", &path(), errno))?;
        let Some(file) = opened.map(Arc::new) else {
            continue;
        };
        let deadline = BootTime::now() + timeout;
        let looked = loop {
            // The file of an empty line must be removed, which needs the lock.
            let peeked = tx::peek(store, "survey", Arc::clone(&file), Suspects::Everyone);
            if let Some(looked) = peeked.filter(|looked| !looked.state().line.seats.is_empty()) {
                break Some(looked);
            }
            match file.lock("survey")? {
                Lock::Had(state) => {
                    let mut tx = Tx::new(store, "survey", Some(Arc::clone(&file)), state);
                    // A survey does not care whether anyone can be granted.
                    let _ = tx.settle(Suspects::Everyone);
                    file.remove_if_empty(home, &tx.state);
                    break Some(Looked::at(tx));
                }
                Lock::Gone => break None,
                Lock::Taken if deadline.has_passed() => {
                    return Err(busy("survey", timeout, &file.path));
                }
                Lock::Taken => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        let Some(looked) = looked else { continue };
        let State { name, line, .. } = looked.state();
        let ours = looked.state().namespace == namespace && scope.includes(name);
        if ours && !line.seats.is_empty() {
            reports.push(line.report(name, looked.now(), Extra::who));
            seats.extend(line.seats.iter().cloned());
        }
        looked.done(None)?;
    }
    reports.sort_by(|one, other| one.name.cmp(&other.name));
    show_renewals(store, &seats, &mut reports);
    Ok((reports, Sleep::on(seats.iter())))
}

/// Shows leases with their last renewal, which is not recorded in their lines.
fn show_renewals(store: &Store, seats: &[Seat<Extra>], reports: &mut [LineReport]) {
    use super::leases::{Found, look_up};
    let now = BootTime::now();
    let lines = reports.iter_mut();
    let claims = lines.flat_map(|line| line.holders.iter_mut().chain(&mut line.waiters));
    let mut claims: HashMap<_, _> = claims.map(|claim| (claim.id.clone(), claim)).collect();
    // Renewal is due after a third of the ttl; before that there is none to look up.
    let due = |seat: &&Seat<_>| seat.expires.saturating_since(now) < seat.ttl * 2 / 3;
    for seat in seats.iter().filter(due) {
        let (process, slot) = (seat.extra.process, seat.extra.slot);
        if let Found::Until(expires) = look_up(store.home(), process, slot, seat.id)
            && let Some(claim) = claims.get_mut(&seat.id.to_string())
        {
            let expires = expires.max(seat.expires);
            claim.expires_in = Some(expires.saturating_since(now));
        }
    }
}

pub(super) fn watch(engine: &FileEngine, scope: &Scope) -> BoxStream<Result<()>> {
    let watch = Watch {
        id: rand::random(),
        engine: engine.clone(),
        scope: scope.clone(),
        sleeper: None,
    };
    Box::pin(stream::unfold(watch, |mut watch| async move {
        let changed = watch.changed().await;
        Some((changed, watch))
    }))
}

/// A watch of a scope.
struct Watch {
    id: u128,
    engine: FileEngine,
    scope: Scope,
    /// The sleeper, and whether it is notified of changes; if not, it must poll.
    sleeper: Option<(Sleeper, bool)>,
}

/// How often a watch polls if it is not notified of changes.
const LOOK: Duration = Duration::from_secs(1);

impl Watch {
    /// Sleeps until something in the scope may have changed.
    async fn changed(&mut self) -> Result<()> {
        let Some((sleeper, hears)) = &self.sleeper else {
            let watcher = &self.engine.store.watcher;
            let sleeper = watcher.sleeper(self.id);
            let hears = watcher.watch_lines(self.id, &self.engine.namespace, &self.scope);
            self.sleeper = Some((sleeper, hears));
            // Report a change at once, since earlier changes would be missed otherwise.
            return Ok(());
        };
        let (_, sleep) = look(&self.engine, &self.scope).await?;
        let until = if *hears {
            BootTime::NEVER
        } else {
            BootTime::now() + LOOK
        };
        sleep_on(sleeper, &sleep, until).await;
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.engine.store.watcher.unwatch_lines(self.id);
    }
}

pub(super) async fn check(engine: &FileEngine) -> Result<Checkup> {
    Ok({
        let mut checkup = Checkup::default();
        checkup.findings = findings(&engine.store);
        checkup
    })
}

/// Findings about the directory.
fn findings(store: &Store) -> Vec<Finding> {
    let dir = &store.home().dir;
    let mut findings = Vec::new();
    let mut add = |severity, code, message: String, remedy: &str| {
        findings.push(Finding::new(severity, code, message, remedy));
    };
    match dir.audience {
        Audience::User => add(
            Severity::Info,
            "covers_user",
            format!(
                "the store covers the processes of one user (uid {}) of this machine",
                rustix::process::geteuid().as_raw()
            ),
            "for several users, share a directory with shared=group",
        ),
        Audience::Group => add(
            Severity::Info,
            "covers_group",
            format!(
                "the store covers the processes of one group (gid {}) of this machine",
                rustix::fs::fstat(&dir.fd).map_or(0, |stat| stat.st_gid)
            ),
            "every member of the group can take part, and can remove locks",
        ),
    }
    if let Ok(Some(kind)) = not_local(&dir.fd) {
        add(
            Severity::Danger,
            "network_fs",
            format!("the store is on {kind}: locks may not exclude"),
            "move it to a directory on a local disk",
        );
    }
    let Ok(stat) = rustix::fs::fstatfs(&dir.fd) else {
        return findings;
    };
    match stat.f_type as u64 & 0xffff_ffff {
        0x0102_1994 | 0x8584_58f6 => add(
            Severity::Warning,
            "memory_fs",
            "the store is in memory: after a reboot tokens depend on the clock alone".into(),
            "use a directory on disk if tokens must never go back",
        ),
        0x794c_7630 => add(
            Severity::Info,
            "overlay_fs",
            "the store is inside a container's own layer: other containers don't see it".into(),
            "mount a volume to share it",
        ),
        _ => {}
    }
    if stat.f_bavail.saturating_mul(stat.f_bsize as u64) < 16 << 20 {
        add(
            Severity::Warning,
            "disk_almost_full",
            "less than 16 MiB are free where the store is".into(),
            "free some space",
        );
    }
    findings
}
