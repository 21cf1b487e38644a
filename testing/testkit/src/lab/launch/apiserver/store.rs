//! `Store`: Leases as kube-apiserver stores them. Every rule here was measured on a real one
//! (v1.36.4, the main ones also on v1.20.2); `tests/kubernetes/status.rs` has a test for each.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};

/// How many events are kept: a watch from before them is answered with 410.
const LOG: usize = 4096;

/// An answer.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) code: u16,
    pub(super) body: Value,
}

impl Answer {
    fn ok(code: u16, body: Value) -> Self {
        Self { code, body }
    }

    /// A `Status` object.
    pub(super) fn status(code: u16, reason: &str, message: &str) -> Self {
        let body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code,
            "details": { "group": "coordination.k8s.io", "kind": "leases" },
        });
        Self { code, body }
    }

    pub(super) fn with_details(mut self, details: Value) -> Self {
        self.body["details"] = details;
        self
    }

    fn conflict(message: &str) -> Self {
        Self::status(409, "Conflict", message)
    }

    fn invalid(message: &str) -> Self {
        Self::status(422, "Invalid", message)
    }

    fn bad_request(message: &str) -> Self {
        Self::status(400, "BadRequest", message)
    }

    fn missing(name: &str) -> Self {
        let message = format!("leases.coordination.k8s.io {name:?} not found");
        Self::status(404, "NotFound", &message)
    }

    /// This 500 has no reason: the client is wrong, and a retry would not help.
    fn client_bug(message: &str) -> Self {
        let mut answer = Self::status(500, "", message);
        if let Some(body) = answer.body.as_object_mut() {
            body.remove("reason");
        }
        answer
    }
}

type Answered = Result<Answer, Answer>;

/// A change, as a watch reports it.
#[derive(Debug, Clone)]
pub(super) struct Event {
    pub(super) version: u64,
    pub(super) kind: &'static str,
    pub(super) object: Value,
    /// The previous object, if there was one.
    pub(super) before: Option<Value>,
}

/// The Leases of one namespace.
#[derive(Debug)]
pub(super) struct Store {
    /// One counter for all objects, as in etcd.
    pub(super) version: u64,
    leases: BTreeMap<String, Value>,
    pub(super) log: VecDeque<Event>,
    /// A watch from before this version is answered with 410.
    pub(super) oldest: u64,
    uids: u64,
    pub(super) namespace: String,
    pub(super) terminating: bool,
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or("")
}

fn version_of(object: &Value) -> &str {
    text(object, "/metadata/resourceVersion")
}

impl Store {
    pub(super) fn new(namespace: &str) -> Self {
        Self {
            version: 204,
            leases: BTreeMap::new(),
            log: VecDeque::new(),
            oldest: 0,
            uids: 0,
            namespace: namespace.to_owned(),
            terminating: false,
        }
    }

    pub(super) fn get(&self, name: &str) -> Answer {
        match self.leases.get(name) {
            Some(lease) => Answer::ok(200, lease.clone()),
            None => Answer::missing(name),
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Value> {
        self.leases.values()
    }

    /// The answer to a request in a namespace that does not exist.
    pub(super) fn elsewhere(&self, verb: &str, namespace: &str, name: &str) -> Answer {
        match self.may_create(namespace) {
            Err(refused) if matches!(verb, "create" | "update") => refused,
            _ => Answer::missing(name),
        }
    }

    /// Simulates another write in the cluster, which increments the counter.
    pub(super) fn tick(&mut self) {
        self.version += 1;
    }

    pub(super) fn create(&mut self, namespace: &str, body: &[u8]) -> Answer {
        self.try_create(namespace, body)
            .unwrap_or_else(|refused| refused)
    }

    fn try_create(&mut self, namespace: &str, body: &[u8]) -> Answered {
        let lease = parse(body)?;
        let name = text(&lease, "/metadata/name").to_owned();
        check(&lease)?;
        if !version_of(&lease).is_empty() {
            let message = "resourceVersion should not be set on objects to be created";
            return Err(Answer::client_bug(message));
        }
        self.may_create(namespace)?;
        if let Some(there) = self.leases.get(&name) {
            let deleted = there.pointer("/metadata/deletionTimestamp").is_some();
            let why = if deleted {
                "object is being deleted"
            } else {
                "already exists"
            };
            let message = format!("leases.coordination.k8s.io {name:?} {why}");
            return Err(Answer::status(409, "AlreadyExists", &message));
        }
        Ok(self.insert(&name, lease))
    }

    fn may_create(&self, namespace: &str) -> Result<(), Answer> {
        if namespace != self.namespace {
            let message = format!("namespaces {namespace:?} not found");
            let details = json!({ "name": namespace, "kind": "namespaces" });
            return Err(Answer::status(404, "NotFound", &message).with_details(details));
        }
        if self.terminating {
            let message =
                "unable to create new content in a namespace because it is being terminated";
            let details =
                json!({ "kind": "leases", "causes": [{ "reason": "NamespaceTerminating" }] });
            return Err(Answer::status(403, "Forbidden", message).with_details(details));
        }
        Ok(())
    }

    fn insert(&mut self, name: &str, mut lease: Value) -> Answer {
        self.uids += 1;
        let metadata = &mut lease["metadata"];
        metadata["uid"] = format!("00000000-0000-4000-8000-{:012}", self.uids).into();
        metadata["namespace"] = self.namespace.clone().into();
        metadata["creationTimestamp"] = "2026-01-02T03:04:05Z".into();
        self.store(name, lease, "ADDED");
        Answer::ok(201, self.leases[name].clone())
    }

    /// Writes an object with the next version, and notifies the watches.
    fn store(&mut self, name: &str, mut lease: Value, kind: &'static str) {
        self.version += 1;
        lease["metadata"]["resourceVersion"] = self.version.to_string().into();
        lease["apiVersion"] = "coordination.k8s.io/v1".into();
        lease["kind"] = "Lease".into();
        // Returned with every object.
        lease["metadata"]["managedFields"] =
            json!([{ "manager": "palisade", "operation": "Update" }]);
        let before = if kind == "DELETED" {
            self.leases.remove(name)
        } else {
            self.leases.insert(name.to_owned(), lease.clone())
        };
        self.log.push_back(Event {
            version: self.version,
            kind,
            object: lease,
            before,
        });
        if self.log.len() > LOG
            && let Some(event) = self.log.pop_front()
        {
            self.oldest = event.version + 1;
        }
    }

    pub(super) fn replace(&mut self, namespace: &str, name: &str, body: &[u8]) -> Answer {
        let replaced = parse(body).and_then(|lease| self.try_replace(namespace, name, lease));
        replaced.unwrap_or_else(|refused| refused)
    }

    fn try_replace(&mut self, namespace: &str, name: &str, mut lease: Value) -> Answered {
        if text(&lease, "/metadata/name") != name {
            return Err(Answer::bad_request(
                "the name of the object does not match the name on the URL",
            ));
        }
        check(&lease)?;
        let version = version_of(&lease).to_owned();
        if !version.is_empty() && version.parse::<u64>().is_err() {
            return Err(Answer::client_bug("unable to convert the resource version"));
        }
        let uid = text(&lease, "/metadata/uid").to_owned();
        let Some(old) = self.leases.get(name) else {
            if !uid.is_empty() {
                let message = "Precondition failed: UID in precondition: …, UID in object meta: ";
                return Err(Answer::conflict(message));
            }
            // A PUT creates, and re-creates a deleted object, whatever version it names.
            self.may_create(namespace)?;
            return Ok(self.insert(name, lease));
        };
        if !uid.is_empty() && uid != text(old, "/metadata/uid") {
            return Err(Answer::conflict("Precondition failed: UID"));
        }
        if version.is_empty() || version == "0" {
            return Err(Answer::invalid(
                "metadata.resourceVersion: must be specified for an update",
            ));
        }
        if version != version_of(old) {
            return Err(Answer::conflict("the object has been modified"));
        }
        keep(
            old,
            &mut lease,
            &["uid", "namespace", "creationTimestamp", "deletionTimestamp"],
        );
        Ok(self.update(name, lease))
    }

    /// Stores a changed object; an unchanged one is not written.
    fn update(&mut self, name: &str, mut lease: Value) -> Answer {
        let old = &self.leases[name];
        keep(old, &mut lease, &["resourceVersion", "managedFields"]);
        lease["apiVersion"] = old["apiVersion"].clone();
        lease["kind"] = old["kind"].clone();
        if lease == *old {
            return Answer::ok(200, lease);
        }
        let deleted = lease.pointer("/metadata/deletionTimestamp").is_some();
        let finalizers = lease
            .pointer("/metadata/finalizers")
            .and_then(Value::as_array);
        let gone = deleted && finalizers.is_none_or(Vec::is_empty);
        self.store(
            name,
            lease.clone(),
            if gone { "DELETED" } else { "MODIFIED" },
        );
        match self.leases.get(name) {
            Some(lease) => Answer::ok(200, lease.clone()),
            None => Answer::ok(200, lease),
        }
    }

    pub(super) fn delete(&mut self, name: &str, body: &[u8]) -> Answer {
        let Some(old) = self.leases.get(name) else {
            return Answer::missing(name);
        };
        let options: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
        for (field, is) in [
            ("uid", text(old, "/metadata/uid")),
            ("resourceVersion", version_of(old)),
        ] {
            let wanted = text(&options["preconditions"], &format!("/{field}"));
            if !wanted.is_empty() && wanted != is {
                return Answer::conflict("Precondition failed");
            }
        }
        let mut lease = old.clone();
        let finalizers = lease
            .pointer("/metadata/finalizers")
            .and_then(Value::as_array);
        if finalizers.is_some_and(|finalizers| !finalizers.is_empty()) {
            if lease.pointer("/metadata/deletionTimestamp").is_none() {
                lease["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:06Z".into();
                self.store(name, lease, "MODIFIED");
            }
            return self.get(name);
        }
        self.store(name, lease, "DELETED");
        let status =
            json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success" });
        Answer::ok(200, status)
    }

    pub(super) fn patch(
        &mut self,
        namespace: &str,
        name: &str,
        media: &str,
        body: &[u8],
    ) -> Answer {
        let patched = self.try_patch(namespace, name, media, body);
        patched.unwrap_or_else(|refused| refused)
    }

    fn try_patch(&mut self, namespace: &str, name: &str, media: &str, body: &[u8]) -> Answered {
        let patch: Value =
            serde_json::from_slice(body).map_err(|_| Answer::bad_request("no JSON"))?;
        let apply = media.contains("apply-patch");
        let Some(old) = self.leases.get(name).cloned() else {
            if !apply {
                return Err(Answer::missing(name));
            }
            self.may_create(namespace)?;
            let mut lease = patch;
            lease["metadata"]["name"] = name.into();
            return Ok(self.insert(name, lease));
        };
        let mut lease = old.clone();
        if media.contains("json-patch") {
            for step in patch.as_array().into_iter().flatten() {
                let at = text(step, "/path").to_owned();
                match text(step, "/op") {
                    "test" if lease.pointer(&at) != Some(&step["value"]) => {
                        return Err(Answer::invalid(
                            "the server rejected our request due to an error in our request",
                        ));
                    }
                    "replace" | "add" => match lease.pointer_mut(&at) {
                        Some(target) => *target = step["value"].clone(),
                        None => return Err(Answer::invalid("no such path")),
                    },
                    _ => {}
                }
            }
        } else {
            merge(&mut lease, &patch);
        }
        check(&lease)?;
        // Without a version the last writer wins.
        let asked = version_of(&patch);
        if !asked.is_empty() && asked != version_of(&old) {
            return Err(Answer::conflict("the object has been modified"));
        }
        keep(&old, &mut lease, &["uid"]);
        Ok(self.update(name, lease))
    }
}

fn keep(old: &Value, new: &mut Value, fields: &[&str]) {
    for field in fields {
        match old["metadata"].get(*field) {
            Some(value) => new["metadata"][*field] = value.clone(),
            None => {
                if let Some(metadata) = new["metadata"].as_object_mut() {
                    metadata.remove(*field);
                }
            }
        }
    }
}

fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = Value::Object(Map::new());
    }
    for (key, value) in patch {
        if value.is_null() {
            into.as_object_mut().map(|into| into.remove(key));
        } else {
            merge(&mut into[key.as_str()], value);
        }
    }
}

/// Parses a Lease from a body: anything else is a 400, and unknown fields are dropped.
fn parse(body: &[u8]) -> Result<Value, Answer> {
    let mut lease: Value =
        serde_json::from_slice(body).map_err(|_| Answer::bad_request("no JSON"))?;
    for (field, value) in [("apiVersion", "coordination.k8s.io/v1"), ("kind", "Lease")] {
        if lease.get(field).is_some_and(|is| is != value) {
            return Err(Answer::bad_request(
                "the object is of another kind or version",
            ));
        }
    }
    let Some(object) = lease.as_object_mut() else {
        return Err(Answer::bad_request("no object"));
    };
    object.retain(|field, _| matches!(field.as_str(), "apiVersion" | "kind" | "metadata" | "spec"));
    if !object.get("metadata").is_some_and(Value::is_object) {
        object.insert("metadata".into(), json!({}));
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
        // Go omits empty maps.
        metadata.retain(|_, value| value.as_object().is_none_or(|map| !map.is_empty()));
    }
    let spec = object.entry("spec").or_insert(json!({}));
    let Some(spec) = spec.as_object_mut() else {
        return Err(Answer::bad_request("spec is no object"));
    };
    const FIELDS: &[&str] = &[
        "acquireTime",
        "holderIdentity",
        "leaseDurationSeconds",
        "leaseTransitions",
        "renewTime",
    ];
    spec.retain(|field, value| FIELDS.contains(&field.as_str()) && !value.is_null());
    for field in ["acquireTime", "renewTime"] {
        if let Some(time) = spec.get_mut(field) {
            let read = time.as_str().and_then(micro_time);
            let bad = || Answer::bad_request("the time is no MicroTime");
            *time = read.ok_or_else(bad)?.into();
        }
    }
    for field in ["leaseDurationSeconds", "leaseTransitions"] {
        if let Some(number) = spec.get(field) {
            let fits = number
                .as_i64()
                .is_some_and(|number| i32::try_from(number).is_ok());
            if !fits {
                return Err(Answer::bad_request("the number is no int32"));
            }
        }
    }
    if spec
        .get("holderIdentity")
        .is_some_and(|holder| !holder.is_string())
    {
        return Err(Answer::bad_request("holderIdentity is no string"));
    }
    Ok(lease)
}

/// The validation of Leases, which refuses with 422.
fn check(lease: &Value) -> Result<(), Answer> {
    let name = text(lease, "/metadata/name");
    if !is_subdomain(name) {
        return Err(Answer::invalid(
            "metadata.name: a lowercase RFC 1123 subdomain must consist of …",
        ));
    }
    let number = |field: &str| lease["spec"].get(field).and_then(Value::as_i64);
    if number("leaseDurationSeconds").is_some_and(|seconds| seconds < 1) {
        return Err(Answer::invalid(
            "spec.leaseDurationSeconds: must be greater than 0",
        ));
    }
    if number("leaseTransitions").is_some_and(|count| count < 0) {
        return Err(Answer::invalid(
            "spec.leaseTransitions: must be greater than or equal to 0",
        ));
    }
    let annotations = lease
        .pointer("/metadata/annotations")
        .and_then(Value::as_object);
    let size = |(key, value): (&String, &Value)| key.len() + value.as_str().map_or(0, str::len);
    let total: usize = annotations.into_iter().flatten().map(size).sum();
    if total > 256 * 1024 {
        return Err(Answer::invalid(
            "metadata.annotations: Too long: must have at most 262144 bytes",
        ));
    }
    Ok(())
}

fn is_subdomain(name: &str) -> bool {
    let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let label = |label: &str| {
        let bytes = label.as_bytes();
        bytes.first().is_some_and(plain)
            && bytes.last().is_some_and(plain)
            && bytes.iter().all(|byte| plain(byte) || *byte == b'-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// `2026-01-02T03:04:05.123456Z`: exactly six digits; an offset is accepted and converted to UTC.
fn micro_time(time: &str) -> Option<String> {
    let form = |text: &str, form: &str| {
        text.len() == form.len()
            && text
                .bytes()
                .zip(form.bytes())
                .all(|(byte, form)| match form {
                    b'0' => byte.is_ascii_digit(),
                    b'+' => byte == b'+' || byte == b'-',
                    form => byte == form,
                })
    };
    if form(time, "0000-00-00T00:00:00.000000Z") {
        return Some(time.to_owned());
    }
    if !form(time, "0000-00-00T00:00:00.000000+00:00") {
        return None;
    }
    // Whole hours of at most a day are enough to test that offsets are accepted.
    let hours: i32 = time[26..29].parse().ok()?;
    let hour: i32 = time[11..13].parse().ok()?;
    let utc = (hour - hours).rem_euclid(24);
    Some(format!("{}{utc:02}{}Z", &time[..11], &time[13..26]))
}
