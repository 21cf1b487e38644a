//! `check`: the agent's version, and settings that make locks slow to pass on or easy to read.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Method;
use serde_json::Value;

use super::ConsulEngine;
use super::api::{Api, Committed, SessionSettings};
use super::verdict::UNKNOWN_TOKEN;
use super::wire::{Op, session_text};
use crate::core::duration::parse_duration;
use crate::core::error::{Kind, Result};
use crate::core::report::{Checkup, Finding, Severity};
use crate::engines::remote::plain_text;

/// What an agent says of itself, as far as the token lets us read it.
#[derive(Debug, Clone, Default)]
pub(super) struct Agent {
    pub(super) version: Option<String>,
    /// The shortest ttl of a session.
    pub(super) ttl_min: Option<Duration>,
    /// Whether it is a server that keeps its data in memory alone.
    in_memory: bool,
}

/// Consul's own default for `session_ttl_min`.
pub(super) const TTL_MIN: Duration = Duration::from_secs(10);

/// Asks the agent; nothing is known when the token may not read it.
pub(super) async fn agent(api: &Api) -> Result<Agent> {
    let asked = api.raw("connect", Method::GET, "/v1/agent/self?", Vec::new());
    let (status, body) = match asked.await {
        Ok(answer) => answer,
        Err(error) if error.message() == UNKNOWN_TOKEN => return Err(error),
        Err(error) if error.kind() == Kind::Denied => return Ok(Agent::default()),
        Err(error) => return Err(error),
    };
    if status != 200 {
        return Ok(Agent::default());
    }
    let says: Value = serde_json::from_slice(&body).unwrap_or_default();
    let text = |path: &str| {
        says.pointer(path)
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    let ttl_min = text("/DebugConfig/SessionTTLMin")
        .and_then(|text| parse_duration(&text).ok())
        .filter(|ttl| !ttl.is_zero());
    Ok(Agent {
        version: text("/Config/Version"),
        ttl_min,
        in_memory: says.pointer("/DebugConfig/DevMode") == Some(&Value::Bool(true)),
    })
}

impl ConsulEngine {
    pub(super) async fn do_check(self: Arc<Self>) -> Result<Checkup> {
        let agent = agent(&self.api).await?;
        let mut findings: Vec<Finding> = plain_text(&self.hosts, self.encrypted)
            .into_iter()
            .collect();
        if agent.version.is_none() {
            findings.push(Finding {
                severity: Severity::Info,
                code: "agent_unread",
                message: "the ACL token may not read the agent, so its version and session_ttl_min are not known".to_owned(),
                remedy: "give it agent:read, or leave it if ttls below 10s are not wanted".to_owned(),
            });
        }
        if agent.in_memory {
            findings.push(Finding {
                severity: Severity::Danger,
                code: "in_memory",
                message: "this agent runs with -dev: it keeps its data in memory, and a restart forgets locks and tokens".to_owned(),
                remedy: "run servers with a data_dir".to_owned(),
            });
        }
        if agent.version.as_deref().is_some_and(is_old) {
            findings.push(Finding {
                severity: Severity::Warning,
                code: "old_version",
                message: "this Consul is older than 1.4, which locks were never tried with"
                    .to_owned(),
                remedy: "upgrade Consul".to_owned(),
            });
        }
        let takes = self.default_ttl * 2 + self.lock_delay;
        findings.push(Finding {
            severity: Severity::Info,
            code: "take_over",
            message: format!(
                "with a ttl of {:?} a lock whose holder died is free after up to {takes:?}: Consul keeps a session for up to twice its ttl{}",
                self.default_ttl,
                match self.lock_delay.is_zero() {
                    true => String::new(),
                    false => format!(", and the lock for a lock_delay of {:?} more", self.lock_delay),
                }
            ),
            remedy: "choose a shorter ttl; session_ttl_min of the servers bounds it".to_owned(),
        });
        findings.extend(self.rights().await?);
        Ok(Checkup {
            version: agent.version,
            clock_ahead_us: None,
            findings,
        })
    }

    /// Tries what a lock needs: a session, and a write in the namespace.
    async fn rights(&self) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let settings = SessionSettings {
            ttl: self.default_ttl,
            lock_delay: Duration::ZERO,
            checks: self.checks.clone(),
        };
        let session = match self.api.create_session(&settings).await {
            Ok(session) => Some(session_text(session)),
            Err(error) if error.kind() == Kind::Denied => {
                findings.push(denied(
                    "create sessions: it lacks session:write",
                    "node_prefix \"\" { policy = \"read\" } session_prefix \"\" { policy = \"write\" }",
                ));
                None
            }
            Err(error) if error.kind() == Kind::Config => {
                findings.push(Finding {
                    severity: Severity::Warning,
                    code: "node_check",
                    message: error.message().to_owned(),
                    remedy:
                        "name checks of the agent's node, such as serfHealth, or omit node_checks"
                            .to_owned(),
                });
                None
            }
            Err(error) => return Err(error),
        };
        let probe = session.as_deref().unwrap_or("rights");
        let probe = self.keys.mark(&format!("check-{probe}"));
        let ops = match &session {
            Some(session) => vec![
                Op::lock(&probe, session, 0, ""),
                Op::unlock(&probe, session),
                Op::delete(&probe),
            ],
            None => vec![Op::set(&probe, 0, ""), Op::delete(&probe)],
        };
        let tried = self.api.transact("check", &ops).await;
        if let Some(session) = session {
            self.api.destroy_session(&session).await?;
        }
        match tried {
            Ok(Committed::Done(_)) => {}
            Err(error) if error.kind() != Kind::Denied => return Err(error),
            Ok(Committed::Refused(_)) | Err(_) => findings.push(denied(
                "write keys of this namespace: it lacks key:write",
                &format!(
                    "key_prefix {:?} {{ policy = \"write\" }}",
                    self.keys.beginning("")
                ),
            )),
        }
        Ok(findings)
    }
}

fn denied(what: &str, rule: &str) -> Finding {
    Finding {
        severity: Severity::Warning,
        code: "acl_denied",
        message: format!("the ACL token may not {what}"),
        remedy: format!("give it a policy with {rule}"),
    }
}

fn is_old(version: &str) -> bool {
    let mut numbers = version
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version < (1, 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert!(is_old("1.3.9") && !is_old("1.8.7") && !is_old("1.10.0") && !is_old("2.0"));
    }
}
