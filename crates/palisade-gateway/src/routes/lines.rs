//! The routes of lines: who holds and who waits, who leads, and hints about changes.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use hyper::StatusCode;
use palisade::Name;
use palisade::engine::Engine;
use palisade::report::Scope;
use serde_json::json;

use super::body::duration;
use super::{Answered, Asking, Routes};
use crate::answer::{document, reply};
use crate::events;
use crate::problem::Problem;
use crate::wire;

/// The default and the maximum number of lines in one response.
const LINES: usize = 1000;
const MOST_LINES: usize = 10_000;
/// The longest page, in bytes, unless one line alone is longer.
const PAGE: usize = 4 * 1024 * 1024 - 1024;
/// How many lines are shown before others get their turn.
const AT_ONCE: usize = 64;
/// How much of a refused prefix is in the audit events.
const LONGEST_SHOWN: usize = 256;
/// The longest that a request waits for a leader.
const LONGEST_WAIT: Duration = Duration::from_secs(50);

impl Routes {
    pub(super) async fn lines(&self, asking: &Asking) -> Answered {
        let query = &asking.query;
        let scope = match (query.get("name"), query.get("prefix")) {
            (Some(_), Some(_)) => {
                return Err(Problem::bad_request("give a name or a prefix, not both"));
            }
            (Some(name), None) => Scope::Line(self.seen(asking, name)?),
            (None, prefix) => Scope::Prefix(prefix.cloned().unwrap_or_default()),
        };
        let limit = match query.get("limit").map(|limit| limit.parse::<usize>()) {
            None => LINES,
            Some(Ok(limit)) if limit > 0 => limit.min(MOST_LINES),
            Some(_) => return Err(Problem::bad_request("limit must be a whole number from 1")),
        };
        let after = query.get("after").map_or("", String::as_str);
        let records = query
            .get("records")
            .is_some_and(|records| records == "true");
        // A survey of all lines is work, whoever asks.
        let _one = match &scope {
            Scope::Prefix(_) => {
                self.sessions
                    .counters
                    .great_request(&asking.principal)
                    .await
            }
            Scope::Line(_) => None,
        };
        let mut found = self.client.survey(scope).await?;
        let sees = |name: &str| asking.principal.may_see(name);
        found.retain(|line| line.name.as_str() > after && sees(&line.name));
        found.sort_by(|one, other| one.name.cmp(&other.name));
        let more = found.len() > limit;
        found.truncate(limit);
        let mut next = found.last().filter(|_| more).map(|line| line.name.as_str());
        let mut text = String::from("{\"lines\":[");
        for (at, line) in found.iter().enumerate() {
            if at % AT_ONCE == AT_ONCE - 1 {
                tokio::task::yield_now().await;
            }
            let line = wire::line(&self.client, line, records, sees)?.to_string();
            if at > 0 {
                // One line may be longer than a page: it is one alone.
                if text.len() + line.len() > PAGE {
                    next = Some(&found[at - 1].name);
                    break;
                }
                text.push(',');
            }
            text += &line;
        }
        text += &format!("],\"next\":{}}}", json!(next));
        Ok(document(text))
    }

    fn seen(&self, asking: &Asking, name: &str) -> Result<Name, Problem> {
        let name = Name::new(name)?;
        if !asking.principal.may_see(name.as_str()) {
            return Err(Problem::forbidden("you may not see this name").about(name.as_str()));
        }
        Ok(name)
    }

    /// Who leads; with `wait`, waits for a leader.
    pub(super) async fn leader(&self, asking: &Asking) -> Answered {
        let Some(name) = asking.query.get("name") else {
            return Err(Problem::bad_request("name the election: ?name=NAME"));
        };
        let name = self.seen(asking, name)?;
        let wait = asking.query.get("wait");
        let wait = wait.map_or(Ok(Duration::ZERO), |wait| duration("wait", wait))?;
        let _counted = self.sessions.counters.waiting(&asking.principal)?;
        let until = asking.arrival + wait.min(LONGEST_WAIT);
        let election = self.client.election(&name);
        let mut changes = self.client.engine().watch(Scope::Line(name.clone()));
        let leader = loop {
            let leader = election.leader().await?;
            if leader.is_some() || until.has_passed() {
                break leader;
            }
            // A hint can be lost; polling once a second is cheap.
            let recheck = until.remaining().min(Duration::from_secs(1));
            let _ = tokio::time::timeout(recheck, changes.next()).await;
        };
        let shown = leader.map(|leader| {
            let owner = leader.owner.as_ref();
            json!({
                "value": leader.value,
                "owner": owner.map(|owner| &owner.owner),
                "host": owner.map(|owner| &owner.host),
                "pid": owner.map(|owner| owner.pid),
                "token": leader.token.to_string(),
                "since": owner.map(|owner| wire::time(owner.since)),
            })
        });
        let answer = json!({"name": name.as_str(), "leader": shown});
        Ok(reply(StatusCode::OK, &answer))
    }

    pub(super) fn line_events(&self, asking: &Asking) -> Answered {
        // Without a prefix: everything that the principal may see, and nothing else.
        let prefixes = match asking.query.get("prefix") {
            Some(prefix) if asking.principal.may_see(prefix) => vec![prefix.as_str()],
            Some(prefix) => {
                let shown: String = prefix.chars().take(LONGEST_SHOWN).collect();
                return Err(Problem::forbidden("you may not see this prefix").about(&shown));
            }
            None => asking.principal.visible(),
        };
        if prefixes.is_empty() {
            return Err(Problem::forbidden("you may see nothing here"));
        }
        let counted = self.sessions.counters.waiting(&asking.principal)?;
        let watch = |prefix: &str| self.client.engine().watch(Scope::Prefix(prefix.into()));
        let changes = stream::select_all(prefixes.into_iter().map(watch));
        let ended = self.access.clone().ended(Arc::clone(&asking.principal));
        Ok(events::of_lines(Box::pin(changes), counted, ended))
    }
}
