//! The routes of sessions: open, keep alive, listen, close.

use std::sync::Arc;

use hyper::StatusCode;
use palisade::BootTime;
use serde_json::{Value, json};

use super::body::duration;
use super::{Answered, Asking, Routes};
use crate::answer::{document, reply};
use crate::events;
use crate::problem::Problem;
use crate::session::{Known, Session};
use crate::wire;

/// The header with a session's secret.
pub(super) const SESSION: &str = "palisade-session";

/// How many claims of a keep-alive are handled before others get their turn.
const AT_ONCE: usize = 256;

impl Routes {
    pub(super) fn open_session(&self, asking: &Asking, asked: wire::OpenSession) -> Answered {
        if !asking.principal.uses_anything() {
            let detail = "you may use no name, so that a session would be of no use";
            return Err(Problem::forbidden(detail));
        }
        let ttl = asked.ttl.as_deref().map(|ttl| duration("ttl", ttl));
        let ttl = self
            .sessions
            .counters
            .ttl(ttl.transpose()?, self.client.ttl())?;
        let ttl = self.client.capability().explicit_ttl(ttl)?;
        if let Some(secret) = &asked.secret
            && !(secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()))
        {
            return Err(Problem::bad_request(
                "a secret is 256 random bits as 64 hex digits; omit it to be given one",
            ));
        }
        let (principal, chosen) = (&asking.principal, asked.secret);
        let (session, secret) = self.sessions.open(principal, &self.client, ttl, chosen)?;
        self.sessions.extend(&session, asking.arrival)?;
        let opened = self.opened(asking, &session, &secret);
        Ok(reply(StatusCode::CREATED, &opened))
    }

    pub(super) fn opened(&self, asking: &Asking, session: &Session, secret: &str) -> Value {
        json!({
            "id": session.id,
            "secret": secret,
            "ttl_ms": session.ttl.as_millis() as u64,
            "url": self.names.url(asking.via.door),
        })
    }

    pub(super) fn session(&self, asking: &Asking) -> Result<Arc<Session>, Problem> {
        let secret = asking
            .headers
            .get(SESSION)
            .and_then(|secret| secret.to_str().ok());
        let Some(secret) = secret else {
            return Err(Problem::bad_request(
                "name the session by its secret in the header Palisade-Session",
            ));
        };
        self.sessions.find(&asking.principal, secret)
    }

    pub(super) async fn keep_alive(&self, asking: &Asking, asked: wire::KeepAlive) -> Answered {
        let session = self.session(asking)?;
        let (counters, claims) = (&self.sessions.counters, &asked.claims);
        let most = counters.most_claims();
        if claims.len() > most {
            return Err(Problem::bad_request(format!(
                "the field `claims`: a principal has at most {most} claims"
            )));
        }
        if let Some(flaw) = asked.flaw {
            return Err(Problem::bad_request(flaw));
        }
        let _one = match claims.len() {
            0..=AT_ONCE => None,
            _ => counters.great_request(&asking.principal).await,
        };
        let until = self.sessions.extend(&session, asking.arrival)?;
        // The text is put together here: that of a long list is as much work as the list.
        let mut text = String::from("{\"claims\":[");
        for (at, id) in claims.iter().enumerate() {
            if at > 0 {
                text.push(',');
                if at % AT_ONCE == 0 {
                    tokio::task::yield_now().await;
                }
            }
            text += &self.kept(asking, &session, id, until).to_string();
        }
        let rest = json!({
            "draining": self.sessions.is_draining(),
            "id": session.id,
            "url": self.names.url(asking.via.door),
        });
        text += "],";
        text += &rest.to_string()[1..];
        Ok(document(text))
    }

    /// The state of a claim that a keep-alive names.
    fn kept(&self, asking: &Asking, session: &Session, id: &str, until: Option<BootTime>) -> Value {
        match session.claim(id) {
            None => json!({"id": id, "state": "no_claim"}),
            Some(Known::Over(over)) => json!({"id": id, "state": over.word()}),
            Some(Known::Live(claim)) => {
                // A claim whose right was taken away is not extended.
                if let Some(until) = until
                    && asking.principal.may_use(claim.asked.name.as_str())
                {
                    claim.extend(until);
                }
                self.claim_answer(asking, session, &claim).1
            }
        }
    }

    pub(super) fn session_events(&self, asking: &Asking) -> Answered {
        let session = self.session(asking)?;
        let counted = self.sessions.counters.waiting(&asking.principal)?;
        let ended = self.access.clone().ended(Arc::clone(&asking.principal));
        Ok(events::of_session(&session, counted, ended))
    }

    /// Releases everything. It continues even if the client does not wait.
    pub(super) async fn close_session(&self, asking: &Asking) -> Answered {
        let session = self.session(asking)?;
        let answer = json!({"id": session.id});
        let all = Arc::clone(&self.sessions);
        let closing = tokio::spawn(async move { all.end(&session, "closed").await });
        // It can't panic, and ends with the engine's own timeouts.
        let _ = closing.await;
        Ok(reply(StatusCode::OK, &answer))
    }
}
