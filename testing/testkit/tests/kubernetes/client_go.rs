//! `Elector`: a contender that does what client-go's `LeaderElector` does with a `LeaseLock`, step
//! by step (`leaderelection.go`, `leaselock.go`, v1.36), over plain HTTP.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use palisade_testkit::lab::launch::apiserver::{ApiServer, NAMESPACE};
use serde_json::{Value, json};

/// The record that `resourcelock` derives from a Lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Record {
    holder: String,
    duration: i64,
    acquire: String,
    renew: String,
    transitions: i64,
}

impl Record {
    fn of(lease: &Value) -> Self {
        let spec = &lease["spec"];
        let text = |field: &str| spec[field].as_str().unwrap_or("").to_owned();
        // metav1.Time has whole seconds.
        let time = |field: &str| text(field).split('.').next().unwrap_or("").to_owned();
        Self {
            holder: text("holderIdentity"),
            duration: spec["leaseDurationSeconds"].as_i64().unwrap_or(0),
            acquire: time("acquireTime"),
            renew: time("renewTime"),
            transitions: spec["leaseTransitions"].as_i64().unwrap_or(0),
        }
    }
}

/// See the module documentation.
pub(crate) struct Elector<'a> {
    server: &'a ApiServer,
    name: String,
    identity: String,
    duration: i64,
    /// The object as it was last read or written.
    lease: Option<Value>,
    observed: Record,
    observed_at: Instant,
    /// How far its clock is ahead.
    clock_ahead: i64,
}

impl<'a> Elector<'a> {
    pub(crate) fn new(server: &'a ApiServer, name: &str, identity: &str, duration: i64) -> Self {
        Self {
            server,
            name: name.to_owned(),
            identity: identity.to_owned(),
            duration,
            lease: None,
            observed: Record::default(),
            observed_at: Instant::now(),
            clock_ahead: 0,
        }
    }

    pub(crate) fn with_clock_ahead(mut self, seconds: i64) -> Self {
        self.clock_ahead = seconds;
        self
    }

    fn path(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases")
    }

    /// The current time as metav1.MicroTime.
    fn now(&self) -> String {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let seconds = since.as_secs() as i64 + self.clock_ahead;
        let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Days since the epoch as a date, by Howard Hinnant's civil_from_days.
        let z = days + 719_468;
        let (era, doe) = (z.div_euclid(146_097), z.rem_euclid(146_097));
        let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let (day, month) = (
            doy - (153 * mp + 2) / 5 + 1,
            if mp < 10 { mp + 3 } else { mp - 9 },
        );
        let year = yoe + era * 400 + i64::from(month <= 2);
        let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
        let micros = since.subsec_micros();
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
    }

    fn observe(&mut self, lease: Value) {
        let record = Record::of(&lease);
        if record != self.observed {
            self.observed = record;
            self.observed_at = Instant::now();
        }
        self.lease = Some(lease);
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.observed.holder == self.identity
    }

    fn lease_is_valid(&self) -> bool {
        let duration = Duration::from_secs(self.observed.duration.max(0) as u64);
        self.observed_at + duration > Instant::now()
    }

    fn spec(&self, acquire: &str, renew: &str, transitions: i64) -> Value {
        json!({
            "holderIdentity": self.identity, "leaseDurationSeconds": self.duration,
            "acquireTime": acquire, "renewTime": renew, "leaseTransitions": transitions,
        })
    }

    /// Writes back the whole object with another spec.
    fn update(&mut self, spec: Value) -> bool {
        let mut lease = self.lease.clone().unwrap();
        lease["spec"] = spec;
        let path = format!("{}/{}", self.path(), self.name);
        let (code, _, body) = self.server.ask("PUT", &path, &lease);
        if code == 200 {
            self.observe(body);
        }
        code == 200
    }

    /// `tryAcquireOrRenew`.
    pub(crate) fn try_acquire_or_renew(&mut self) -> bool {
        let now = self.now();
        if self.is_leader() && self.lease_is_valid() {
            let old = self.lease.as_ref().unwrap()["spec"].clone();
            let acquire = old["acquireTime"].as_str().unwrap_or("").to_owned();
            let spec = self.spec(&acquire, &now, self.observed.transitions);
            if self.update(spec) {
                return true;
            }
        }
        let path = format!("{}/{}", self.path(), self.name);
        let (code, _, lease) = self.server.ask("GET", &path, &Value::Null);
        if code == 404 {
            let lease = json!({
                "metadata": { "name": self.name, "namespace": NAMESPACE },
                "spec": self.spec(&now, &now, 0),
            });
            let (code, _, body) = self.server.ask("POST", &self.path(), &lease);
            if code == 201 {
                self.observe(body);
            }
            return code == 201;
        }
        assert_eq!(code, 200, "{lease}");
        self.observe(lease);
        let held = !self.observed.holder.is_empty();
        if held && self.lease_is_valid() && !self.is_leader() {
            return false;
        }
        let old = self.lease.as_ref().unwrap()["spec"].clone();
        let acquire = old["acquireTime"].as_str().unwrap_or("").to_owned();
        let spec = if self.is_leader() {
            self.spec(&acquire, &now, self.observed.transitions)
        } else {
            self.spec(&now, &now, self.observed.transitions + 1)
        };
        self.update(spec)
    }

    /// `release`.
    pub(crate) fn release(&mut self) -> bool {
        if !self.is_leader() {
            return true;
        }
        let now = self.now();
        let mut spec = self.spec(&now, &now, self.observed.transitions);
        spec["holderIdentity"] = "".into();
        spec["leaseDurationSeconds"] = 1.into();
        self.update(spec)
    }
}
