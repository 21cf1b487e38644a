//! `Lease`: an object of the API server, and the line that is kept in it.
//!
//! The fields of `spec` have client-go's meaning: a line is free when `holderIdentity` is empty,
//! and otherwise taken until the record has not changed for `leaseDurationSeconds`. The holders and
//! their tokens are in the annotation [`HOLDERS`]. It counts only while its id equals the
//! `holderIdentity`, because other tools keep annotations when they take a Lease over. All permits
//! of a line are in its one Lease.
//!
//! Nothing here sends requests. A write sends back the object that was read, with changes, so that
//! what others keep in it is preserved.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::lines::Seen;
use palisade_core::engine::{Ask, Claim, ClaimId, capacity_mismatch, unix_time};
use palisade_core::report::Owner;
use palisade_core::{BootTime, Error, ErrorKind, Result};

/// The line's name, because the Lease's own may be a hash.
pub(super) const NAME: &str = "palisade/name";
/// The holders.
const HOLDERS: &str = "palisade/holders";
/// Written by a leave, so that a request in flight is refused.
const FENCE: &str = "palisade/fence";
/// The label of a Lease whose holder an operator evicts; clients watch for it.
pub(super) const EVICT: &str = "palisade/evict";
/// The label of a Lease that we created, and may delete.
const MANAGED: &str = "app.kubernetes.io/managed-by";

/// The duration of a holder that does not set one: client-go's default.
const FOREIGN_TTL: Duration = Duration::from_secs(15);

/// An object of `coordination.k8s.io/v1`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Lease {
    pub(super) metadata: Metadata,
    #[serde(default)]
    pub(super) spec: Spec,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Metadata {
    pub(super) name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) uid: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) resource_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_timestamp: Option<String>,
    annotations: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    /// Not sent back: the server does not need it, and it is half of the object.
    #[serde(skip_serializing)]
    managed_fields: Value,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Spec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) holder_identity: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lease_duration_seconds: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    acquire_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    renew_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_transitions: Option<i32>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// The annotation [`HOLDERS`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Holders {
    /// The `holderIdentity` that it was written with.
    id: String,
    /// The number of permits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    capacity: Option<u32>,
    holders: Vec<Entry>,
}

/// One holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    claim: String,
    /// The resourceVersion that its acquiring write was conditional on.
    pub(super) token: u64,
    /// Whole seconds.
    ttl: u32,
    /// Changes with every renewal, so that others can see it.
    pub(super) renewed: String,
    pub(super) owner: Owner,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) value: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) evicted: bool,
}

impl Entry {
    pub(super) fn is(&self, claim: ClaimId) -> bool {
        self.claim == claim.to_string()
    }

    pub(super) fn ttl(&self) -> Duration {
        Duration::from_secs(self.ttl.into())
    }
}

/// One holder as any observer sees it: its id, and the stamp that changes when it renews.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Holder {
    /// The claim, or the identity of another tool.
    pub(super) id: String,
    pub(super) stamp: String,
    pub(super) ttl: Duration,
    /// When it renewed, by its own clock; microseconds of Unix time.
    renewed: Option<i64>,
    /// `None` for another tool's holder.
    pub(super) entry: Option<Entry>,
}

impl Holder {
    /// Whether it should have renewed by now, by its clock and the server's. It decides only what
    /// is shown, never who holds.
    pub(super) fn is_overdue(&self, server: i64) -> bool {
        self.left(server).is_some_and(|left| left.is_zero())
    }

    /// The time left, by the same clocks.
    pub(super) fn left(&self, server: i64) -> Option<Duration> {
        let ends = self.renewed? + i64::try_from(self.ttl.as_micros()).ok()?;
        let left = u64::try_from(ends.saturating_sub(server)).unwrap_or(0);
        Some(Duration::from_micros(left).min(self.ttl))
    }
}

/// A line as a Lease shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct View {
    pub(super) capacity: Option<u32>,
    pub(super) holders: Vec<Holder>,
}

impl Lease {
    /// A Lease that nobody holds, to be created.
    pub(super) fn free(key: &str, name: &str, stamp: &str) -> Self {
        let mut lease = Self::default();
        lease.rest.insert("apiVersion".into(), API.into());
        lease.rest.insert("kind".into(), "Lease".into());
        lease.metadata.name = key.to_owned();
        lease.note(NAME, name);
        let labels = &mut lease.metadata.labels;
        labels.insert(MANAGED.into(), "palisade".into());
        lease.spec.lease_transitions = Some(0);
        lease.release(stamp);
        lease
    }

    fn note(&mut self, annotation: &str, text: &str) {
        self.metadata
            .annotations
            .insert(annotation.to_owned(), text.to_owned());
    }

    /// The name of its line.
    pub(super) fn name(&self) -> Option<&str> {
        self.metadata.annotations.get(NAME).map(String::as_str)
    }

    /// Its resourceVersion as a number: the token of a grant that is conditional on it.
    ///
    /// # Errors
    /// [`ErrorKind::Unusable`] when it is not a number.
    pub(super) fn version(&self) -> Result<u64> {
        self.metadata.resource_version.parse().map_err(|_| {
            let message = "the API server's resourceVersion is not a number, so it can't be a fencing token; palisade needs one that keeps its data in etcd";
            Error::new(ErrorKind::Unusable, "enter", message)
        })
    }

    /// What a write of it is conditional on: its uid and its resourceVersion.
    pub(super) fn condition(&self) -> (String, String) {
        (
            self.metadata.uid.clone(),
            self.metadata.resource_version.clone(),
        )
    }

    pub(super) fn is_being_deleted(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    fn holder(&self) -> Option<&str> {
        self.spec
            .holder_identity
            .as_deref()
            .filter(|holder| !holder.is_empty())
    }

    /// Our annotation, if it is about the current holder.
    fn holders(&self) -> Option<Holders> {
        serde_json::from_str(self.metadata.annotations.get(HOLDERS)?)
            .ok()
            .filter(|holders: &Holders| {
                Some(holders.id.as_str()) == self.holder() && !holders.holders.is_empty()
            })
    }

    /// The current holders.
    pub(super) fn view(&self) -> View {
        if let Some(Holders {
            capacity, holders, ..
        }) = self.holders()
        {
            let holder = |entry: Entry| Holder {
                id: entry.claim.clone(),
                stamp: entry.renewed.clone(),
                ttl: entry.ttl(),
                renewed: parse_time(&entry.renewed),
                entry: Some(entry),
            };
            let holders = holders.into_iter().map(holder).collect();
            return View { capacity, holders };
        }
        let Some(id) = self.holder() else {
            return View::default();
        };
        let spec = &self.spec;
        let ttl = spec.lease_duration_seconds.and_then(|s| s.try_into().ok());
        let foreign = Holder {
            id: id.to_owned(),
            // Any change counts as a renewal, as in client-go.
            stamp: format!("{} {spec:?}", self.metadata.uid),
            ttl: ttl.map_or(FOREIGN_TTL, Duration::from_secs),
            renewed: spec.renew_time.as_deref().and_then(parse_time),
            entry: None,
        };
        View {
            capacity: None,
            holders: vec![foreign],
        }
    }

    /// The entry of a claim: by its id, and by its token unless that is 0.
    pub(super) fn entry(&self, claim: ClaimId, sequence: u64) -> Option<Entry> {
        let holders = self.holders()?.holders.into_iter();
        let mut own = holders.filter(|entry| entry.is(claim));
        own.find(|entry| sequence == 0 || entry.token == sequence)
    }

    /// The same Lease after `change` was applied to its holders; free when none are left.
    pub(super) fn changed(
        &self,
        stamp: &str,
        change: impl FnOnce(&mut Vec<Entry>, &mut Option<u32>),
    ) -> Self {
        let mut lease = self.clone();
        let Some(mut holders) = self.holders() else {
            return lease;
        };
        change(&mut holders.holders, &mut holders.capacity);
        if holders.holders.is_empty() {
            lease.release(stamp);
        } else {
            lease.write(&holders, stamp);
        }
        lease
    }

    /// The same Lease after these holders have renewed.
    pub(super) fn renewed(&self, stamp: &str, renews: impl Fn(&Entry) -> bool) -> Self {
        self.changed(stamp, |holders, _| {
            let renewed = holders.iter_mut().filter(|entry| renews(entry));
            renewed.for_each(|entry| stamp.clone_into(&mut entry.renewed));
        })
    }

    /// The same Lease with changed holders, none of which is renewed.
    pub(super) fn amended(
        &self,
        stamp: &str,
        change: impl FnOnce(&mut Vec<Entry>, &mut Option<u32>),
    ) -> Self {
        let mut lease = self.changed(stamp, change);
        // Another tool would take a new time for a renewal.
        lease.spec.renew_time.clone_from(&self.spec.renew_time);
        lease
    }

    /// The same Lease without holders.
    pub(super) fn emptied(&self, stamp: &str) -> Self {
        let mut lease = self.clone();
        lease.release(stamp);
        lease
    }

    /// The same Lease, changed only so that writing it gives a new resourceVersion.
    pub(super) fn fenced(&self, stamp: &str) -> Self {
        let mut lease = self.clone();
        lease.note(FENCE, stamp);
        lease
    }

    /// Adds the label that clients watch for.
    pub(super) fn alarming(mut self) -> Self {
        self.metadata.labels.insert(EVICT.into(), String::new());
        self
    }

    /// The same Lease with `claim` added to the holders in `living`.
    fn taken(&self, claim: &Claim, living: &[Holder], stamp: &str) -> Result<Self> {
        let mut lease = self.clone();
        let entry = Entry {
            claim: claim.id.to_string(),
            token: self.version()?,
            ttl: seconds(claim.ttl),
            renewed: stamp.to_owned(),
            owner: claim.owner.clone(),
            value: claim.value.clone(),
            evicted: false,
        };
        let capacity = match claim.ask {
            Ask::Whole => None,
            Ask::Part { capacity, .. } => Some(capacity),
        };
        let mut holders = match self.holders().filter(|_| !living.is_empty()) {
            Some(mut holders) => {
                let lives = |entry: &Entry| living.iter().any(|holder| holder.id == entry.claim);
                holders.holders.retain(lives);
                holders
            }
            None => {
                let spec = &mut lease.spec;
                spec.acquire_time = Some(stamp.to_owned());
                // Only clients count it; other tools show it.
                let transitions = spec.lease_transitions.unwrap_or(0);
                spec.lease_transitions = Some(transitions.saturating_add(1));
                Holders {
                    id: format!("{}_{}", claim.owner.host, claim.id),
                    capacity,
                    holders: Vec::new(),
                }
            }
        };
        holders.holders.push(entry);
        lease.write(&holders, stamp);
        Ok(lease)
    }

    fn write(&mut self, holders: &Holders, stamp: &str) {
        let longest = holders.holders.iter().map(|entry| entry.ttl).max();
        let spec = &mut self.spec;
        spec.holder_identity = Some(holders.id.clone());
        spec.lease_duration_seconds = longest.and_then(|ttl| ttl.try_into().ok());
        spec.renew_time = Some(stamp.to_owned());
        // Strings and numbers always serialize.
        let text = serde_json::to_string(holders).unwrap_or_default();
        self.note(HOLDERS, &text);
        if !holders.holders.iter().any(|entry| entry.evicted) {
            self.metadata.labels.remove(EVICT);
        }
    }

    /// Frees it as client-go does.
    fn release(&mut self, stamp: &str) {
        let spec = &mut self.spec;
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.acquire_time = Some(stamp.to_owned());
        spec.renew_time = Some(stamp.to_owned());
        self.metadata.annotations.remove(HOLDERS);
        self.metadata.labels.remove(EVICT);
    }

    /// Whether it is ours and nobody has held it since `before`, in microseconds of Unix time.
    pub(super) fn is_abandoned(&self, before: i64) -> bool {
        let ours = self.metadata.labels.get(MANAGED).map(String::as_str) == Some("palisade");
        let last = self.spec.renew_time.as_deref().and_then(parse_time);
        ours && self.name().is_some()
            && self.holder().is_none()
            && !self.is_being_deleted()
            && last.is_some_and(|last| last < before)
    }
}

/// The API group and version of Leases.
pub(super) const API: &str = "coordination.k8s.io/v1";

/// What a claim can do on a line.
#[derive(Debug)]
pub(super) enum Decision {
    /// The Lease does not exist yet.
    Create,
    /// It holds with this token, but an operator evicts it.
    Evicted(u64),
    /// It can take its place, or holds already, with this write.
    Write(Box<Write>),
    /// Others hold. The first of them expires at this time, unless it renews.
    Behind {
        until: BootTime,
        /// By their own clocks and the server's, these holders should have expired already.
        overdue: bool,
    },
}

/// The write that takes a place.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) lease: Lease,
    pub(super) token: u64,
    pub(super) stamp: String,
    /// Whether the claim holds already.
    pub(super) again: bool,
}

/// Decides by what was seen. `adopts`: the claim was in the line before its permits were resized.
/// `bare`: names are those of Leases, whatever their annotations say.
///
/// # Errors
/// [`ErrorKind::CapacityMismatch`]; [`ErrorKind::Unusable`] for a resourceVersion that is not a
/// number; [`ErrorKind::InvalidName`] when two names have the same Lease.
pub(super) fn decide(
    seen: &Seen,
    claim: &Claim,
    adopts: bool,
    bare: bool,
    clock: &Clock,
) -> Result<Decision> {
    let Some(lease) = seen.lease.as_deref() else {
        return Ok(Decision::Create);
    };
    if !bare
        && lease
            .name()
            .is_some_and(|other| other != claim.name.as_str())
    {
        let message = "the Lease of this name belongs to another name; use another name";
        return Err(Error::new(ErrorKind::InvalidName, "enter", message));
    }
    let write = |lease, token, stamp, again| {
        Ok(Decision::Write(Box::new(Write {
            lease,
            token,
            stamp,
            again,
        })))
    };
    let View { capacity, holders } = lease.view();
    let mut entries = holders.iter().filter_map(|holder| holder.entry.as_ref());
    match entries.find(|entry| entry.is(claim.id)) {
        Some(entry) if entry.evicted => return Ok(Decision::Evicted(entry.token)),
        // Renewed, so that the start of its lease is known.
        Some(entry) => {
            let (stamp, token) = (clock.stamp(), entry.token);
            return write(
                lease.renewed(&stamp, |entry| entry.is(claim.id)),
                token,
                stamp,
                true,
            );
        }
        None => {}
    }
    let now = BootTime::now();
    let holders = holders.into_iter();
    let living: Vec<Holder> = holders.filter(|holder| seen.ends(holder) > now).collect();
    let foreign = living.iter().any(|holder| holder.entry.is_none());
    let room = match (claim.ask, capacity) {
        _ if foreign => 0,
        (
            Ask::Part {
                capacity: asked, ..
            },
            Some(live),
        ) if asked != live && !adopts => {
            if !living.is_empty() {
                return Err(capacity_mismatch(live, asked));
            }
            1
        }
        (Ask::Part { .. }, Some(live)) => live as usize,
        (Ask::Part { .. }, None) | (Ask::Whole, _) => 1,
    };
    // A hold in an object that is being deleted would vanish with it, unnoticed.
    if living.len() < room && (claim.ask != Ask::Whole || living.is_empty()) {
        if lease.is_being_deleted() {
            let until = now + Duration::from_secs(1);
            let overdue = false;
            return Ok(Decision::Behind { until, overdue });
        }
        let (stamp, token) = (clock.stamp(), lease.version()?);
        return write(lease.taken(claim, &living, &stamp)?, token, stamp, false);
    }
    let until = living.iter().map(|holder| seen.ends(holder)).min();
    let late = living
        .iter()
        .filter(|holder| holder.is_overdue(clock.now()));
    let left = living.len() - late.count();
    Ok(Decision::Behind {
        until: until.unwrap_or(BootTime::NEVER),
        overdue: left < room.max(1) && (claim.ask != Ask::Whole || left == 0),
    })
}

/// Whole seconds, rounded up, so never fewer than the holder relies on.
fn seconds(ttl: Duration) -> u32 {
    (ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).clamp(1, i32::MAX as u64) as u32
}

/// The server's clock, as the `Date` of its replies shows it. It is accurate to a second, and never
/// decides whether a lease has expired.
#[derive(Default)]
pub(super) struct Clock {
    /// How far it is ahead of ours, in microseconds, as the last reply shows it.
    shown: AtomicI64,
}

impl Clock {
    /// Records the date of a reply, in microseconds of Unix time.
    pub(super) fn tell(&self, date: i64) {
        // It is as of the reply, truncated to the second; half a second is added as the mean.
        self.shown
            .store(date + 500_000 - wall_clock(), Ordering::Relaxed);
    }

    /// How far it is ahead of ours, in microseconds; 0 when the difference is below the accuracy.
    pub(super) fn ahead(&self) -> i64 {
        Some(self.shown.load(Ordering::Relaxed))
            .filter(|ahead| ahead.abs() > 2_000_000)
            .unwrap_or(0)
    }

    /// The server's time, in microseconds of Unix time.
    pub(super) fn now(&self) -> i64 {
        wall_clock() + self.ahead()
    }

    /// A time stamp for a record; different at every call.
    pub(super) fn stamp(&self) -> String {
        static LAST: AtomicI64 = AtomicI64::new(0);
        let now = self.now();
        let last = LAST.fetch_max(now, Ordering::Relaxed);
        // Two equal stamps would be no change. After the clock was set back, the stamp is still a
        // different one.
        let stamp = if last == now {
            LAST.fetch_add(1, Ordering::Relaxed) + 1
        } else {
            now
        };
        let since = Duration::from_micros(u64::try_from(stamp).unwrap_or(0));
        // A `MicroTime`, with exactly six fraction digits.
        humantime::format_rfc3339_micros(UNIX_EPOCH + since).to_string()
    }
}

/// Microseconds of Unix time, by our own clock.
pub(super) fn wall_clock() -> i64 {
    i64::try_from(unix_time().as_micros()).unwrap_or(0)
}

/// Parses any RFC 3339 time in UTC into microseconds of Unix time.
pub(super) fn parse_time(text: &str) -> Option<i64> {
    micros(humantime::parse_rfc3339(text).ok()?)
}

/// Microseconds of Unix time.
pub(super) fn micros(time: SystemTime) -> Option<i64> {
    i64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_micros()).ok()
}
