//! The routes for operators: evictions, deadlocks, the engine, metrics, readiness.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use palisade::engine::Engine;
use palisade::report::{Checkup, Deadlock, Scope};
use palisade::{BootTime, ErrorKind, Eviction, Name, Which};
use serde_json::{Value, json};

use super::{Answered, Asking, Routes};
use crate::answer::reply;
use crate::claim::Stage;
use crate::problem::Problem;
use crate::tls::Tls;
use crate::wire::{self, How};

/// How long one check of the engine is cached: many clients may ask, some without a token.
const RECENT: Duration = Duration::from_secs(1);
/// How long the check whether the engine is reachable may take.
const READY_TIME: Duration = Duration::from_secs(2);
/// The longest that an operator's request waits for a holder to let go.
const EVICTION_WAIT: Duration = Duration::from_secs(50);
/// The longest reason of an eviction.
const LONGEST_REASON: usize = 1024;

/// How many sessions are listed individually.
const SESSIONS_SHOWN: usize = 100;

/// A cached result. It is locked during a check, so that concurrent requests share the result.
pub(crate) struct Recent<T>(tokio::sync::Mutex<Option<(BootTime, T)>>);

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self(tokio::sync::Mutex::default())
    }
}

impl<T: Clone> Recent<T> {
    async fn get(&self, look: impl Future<Output = T>) -> T {
        let mut seen = self.0.lock().await;
        if let Some((at, seen)) = &*seen
            && !(*at + RECENT).has_passed()
        {
            return seen.clone();
        }
        let found = look.await;
        *seen = Some((BootTime::now(), found.clone()));
        found
    }
}

/// The shared checks.
#[derive(Default)]
pub(crate) struct Views {
    ready: Recent<Result<(), Problem>>,
    deadlocks: Recent<palisade::Result<Arc<Vec<Deadlock>>>>,
}

impl Routes {
    /// Whether the engine can be reached and the gateway does not drain.
    pub(super) async fn ready(&self) -> Answered {
        if self.sessions.is_draining() {
            return Err(Problem::draining());
        }
        let look = async {
            let nothing = Scope::Line(Name::new("palisade-readyz")?);
            match tokio::time::timeout(READY_TIME, self.client.survey(nothing)).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(error)) => {
                    let mut problem = Problem::from(error);
                    problem.status = StatusCode::SERVICE_UNAVAILABLE;
                    Err(problem)
                }
                Err(_) => Err(Problem::too_late("the engine does not answer")),
            }
        };
        self.views.ready.get(look).await?;
        Ok(reply(StatusCode::OK, &json!({"status": "ready"})))
    }

    pub(super) async fn evict(&self, asking: &Asking, asked: wire::Evict) -> Answered {
        let name = Name::new(&asked.name)?;
        let how = match asked.how {
            How::Ask | How::Mark => Eviction::Mark,
            How::Force => Eviction::Remove,
        };
        if asked.how == How::Mark && asked.claim.is_none() {
            return Err(Problem::bad_request("name the claim that is to be told"));
        }
        if !asking.principal.may_operate(name.as_str()) {
            let refused = Problem::forbidden("you may not evict from this name");
            return Err(refused.about(name.as_str()));
        }
        if asked
            .claim
            .as_ref()
            .is_some_and(|claim| claim.len() > wire::LONGEST_CLAIM)
        {
            return Err(Problem::bad_request("the field `claim` has at most 1 KiB"));
        }
        if asked.reason.trim().is_empty() || asked.reason.len() > LONGEST_REASON {
            return Err(Problem::bad_request(
                "give a reason of at most 1 KiB: it is kept in the audit events",
            ));
        }
        let details = json!({
            "principal": asking.principal.name,
            "peer": asking.via.peer,
            "name": name.as_str(),
            "claim": asked.claim,
            "how": asked.how,
            "reason": asked.reason,
        });
        self.audit.tell("eviction", details);
        // Spawned, so that it is finished even if the operator's request is dropped.
        let (client, sessions) = (self.client.clone(), Arc::clone(&self.sessions));
        let evicting = tokio::spawn(async move {
            let evicted = match &asked.claim {
                Some(claim) if asked.how == How::Mark => {
                    client.engine().evict(name, claim.clone(), how).await?
                }
                Some(claim) => client.evict(&name, Which::Claim(claim), how).await?,
                None => client.evict(&name, Which::Holders, how).await?,
            };
            let id = asked.claim.and_then(|claim| claim.parse().ok());
            if let Some(id) = id.filter(|_| evicted) {
                // Its keeper learns of it a little later.
                let stage = match how {
                    Eviction::Mark => Stage::Evicted,
                    Eviction::Remove => Stage::Lost("an operator took it away".into()),
                };
                sessions.taken(id, &stage);
            }
            Ok::<_, palisade::Error>(evicted)
        });
        let evicted = match tokio::time::timeout(EVICTION_WAIT, evicting).await {
            Ok(Ok(evicted)) => evicted?,
            Ok(Err(_)) => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                let code = ErrorKind::Internal.code();
                return Err(Problem::new(status, code, "the eviction failed (bug)"));
            }
            // It was asked to let go, and has until its lease ends.
            Err(_) => return Ok(reply(StatusCode::ACCEPTED, &json!({"evicted": false}))),
        };
        if evicted {
            return Ok(reply(StatusCode::OK, &json!({"evicted": true})));
        }
        let detail = "there is nobody to evict";
        Err(Problem::new(StatusCode::NOT_FOUND, "absent", detail))
    }

    /// The deadlocks. What this principal may not see is hidden.
    pub(super) async fn deadlocks(&self, asking: &Asking) -> Answered {
        self.must_see(asking)?;
        let look = async { self.client.deadlocks().await.map(Arc::new) };
        let found = self.views.deadlocks.get(look).await?;
        let sees = |name: &str| asking.principal.may_see(name);
        let shown: Vec<_> = found
            .iter()
            .filter_map(|found| wire::deadlock(found, sees))
            .collect();
        Ok(reply(StatusCode::OK, &json!({"deadlocks": shown})))
    }

    fn must_see(&self, asking: &Asking) -> Result<(), Problem> {
        if asking.principal.sees_anything() {
            Ok(())
        } else {
            Err(Problem::forbidden("you may see nothing here"))
        }
    }

    pub(super) async fn engine(&self, asking: &Asking) -> Answered {
        self.must_see(asking)?;
        // A client that connects needs the capability at once.
        let checkup = match asking.query.get("check").map(String::as_str) {
            Some("false") => Checkup::default(),
            _ => self.client.check().await?,
        };
        let own = self.tls.as_ref().and_then(Tls::finding);
        let findings: Vec<Value> = checkup
            .findings
            .iter()
            .chain(&own)
            .map(|finding| {
                json!({
                    "severity": wire::severity(finding.severity),
                    "code": finding.code,
                    "message": finding.message,
                    "remedy": finding.remedy,
                })
            })
            .collect();
        let answer = json!({
            "engine": self.client.describe(),
            "capability": wire::capability(
                &self.client.capability(),
                self.sessions.counters.longest_ttl(),
            ),
            "passable": wire::passable(&self.client.capability()).is_ok(),
            "version": checkup.version,
            "clock_ahead_us": checkup.clock_ahead_us,
            "findings": findings,
            "sessions": self.sessions.count(),
            "open_sessions": self.open_sessions(asking),
            "draining": self.sessions.is_draining(),
            "you": asking.principal.rights(),
        });
        Ok(reply(StatusCode::OK, &answer))
    }

    /// The sessions that a principal may see.
    fn open_sessions(&self, asking: &Asking) -> Vec<Value> {
        let sessions = self.sessions.seen_by(&asking.principal, SESSIONS_SHOWN);
        let shown = sessions.iter().map(|session| {
            let live = session.live();
            let holds = live.iter().filter(|claim| claim.is_held()).count();
            json!({
                "id": session.id,
                "principal": session.principal.name,
                "ttl_ms": session.ttl.as_millis() as u64,
                "ends_in_ms": session.remaining().as_millis() as u64,
                "holds": holds,
                "waits": live.len() - holds,
            })
        });
        shown.collect()
    }

    pub(super) fn metrics(&self, asking: &Asking) -> Answered {
        self.must_see(asking)?;
        let draining = u64::from(self.sessions.is_draining());
        Ok(crate::answer::metrics(self.metrics.text(&[
            ("palisade_gateway_sessions", self.sessions.count() as u64),
            ("palisade_gateway_claims", self.sessions.live() as u64),
            ("palisade_gateway_draining", draining),
        ])))
    }
}
