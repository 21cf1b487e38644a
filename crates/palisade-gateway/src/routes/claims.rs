//! The routes of claims: enter, wait, amend, release. Every response has the promise.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use palisade::engine::{Amended, Amendment, Ask};
use palisade::report::Owner;
use palisade::{BootTime, ErrorKind, Name};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::body::duration;
use super::sessions::SESSION;
use super::{Answered, Asking, Routes};
use crate::access::secret;
use crate::answer::reply;
use crate::claim::{Asked, Claim, Order, Stage, Told};
use crate::limits::Counted;
use crate::problem::Problem;
use crate::session::{Change, Known, Session};
use crate::spans::TRACE;
use crate::wire::{self, MakeClaim};

/// The shortest ttl of a session that a claim without one opens.
const CURL_TTL: Duration = Duration::from_secs(30);
/// How long an engine may take for its first answer before a request reports it as unreachable:
/// more than the engine's own default timeout.
const ENGINE_TIME: Duration = Duration::from_secs(5);

impl Routes {
    /// The claim with this id in the session that a request names.
    fn known(&self, asking: &Asking, id: &str) -> Result<(Arc<Session>, Known), Problem> {
        wire::check_id("id", id).map_err(Problem::bad_request)?;
        let session = self.session(asking)?;
        let known = session.claim(id).ok_or_else(no_claim)?;
        Ok((session, known))
    }

    /// Like [`Routes::known`], for a claim that is not over and that the client may still use.
    fn live(&self, asking: &Asking, id: &str) -> Result<(Arc<Session>, Arc<Claim>), Problem> {
        let (session, known) = self.known(asking, id)?;
        match known {
            Known::Over(over) => Err(self.over(asking, &over)),
            Known::Live(claim) if !asking.principal.may_use(claim.asked.name.as_str()) => {
                let refused = Problem::forbidden("you may not use this name any more");
                Err(refused.about(claim.asked.name.as_str()))
            }
            Known::Live(claim) => Ok((session, claim)),
        }
    }

    /// The current state of a claim, with the promise.
    pub(super) fn claim_answer(
        &self,
        asking: &Asking,
        session: &Session,
        claim: &Claim,
    ) -> (Stage, Value) {
        let valid = session.promise(claim, asking.arrival);
        let mut stage = claim.stage();
        if valid.is_zero() && matches!(stage, Stage::Held { .. }) {
            // The deadline has passed before the task reported it; or it is being released.
            let not_renewed = || Stage::Lost("its lease was not renewed in time".into());
            stage = claim.loss().unwrap_or_else(not_renewed);
        }
        let mut answer = json!({
            "id": claim.id,
            "claim": claim.claim.to_string(),
            "name": claim.asked.name.as_str(),
            "state": stage.word(),
            "url": self.names.url(asking.via.door),
        });
        if let Stage::Held { token, sequence } = stage {
            answer["token"] = token.to_string().into();
            answer["sequence"] = sequence.to_string().into();
        }
        if !stage.is_over() {
            answer["valid_ms"] = (valid.as_millis() as u64).into();
        }
        (stage, answer)
    }

    /// The response about one claim: its state decides the status.
    fn answer_about(&self, asking: &Asking, session: &Session, claim: &Claim) -> Answered {
        let (stage, answer) = self.claim_answer(asking, session, claim);
        match stage {
            Stage::Held { .. } => Ok(reply(StatusCode::OK, &answer)),
            Stage::Waiting | Stage::Entering(None) => Ok(reply(StatusCode::ACCEPTED, &answer)),
            // The task keeps retrying.
            Stage::Entering(Some(error)) => Err(error.maybe_applied().into()),
            over => Err(self.over(asking, &over)),
        }
    }

    /// Why there is no claim any more.
    fn over(&self, asking: &Asking, stage: &Stage) -> Problem {
        let gone = |code, detail: &str| Problem::new(StatusCode::GONE, code, detail);
        match stage {
            Stage::Busy => {
                let detail = "others hold it, and nothing was left behind; ask with queue, a \
                              longer wait or later, under a new id";
                Problem::new(StatusCode::CONFLICT, "busy", detail)
            }
            Stage::Lost(why) => gone("lost", why),
            Stage::Evicted => gone("evicted", "an operator took it away"),
            Stage::Failed(error) => {
                let mut problem = Problem::from(error.clone());
                // The cycle may go through names that this principal may not see.
                if error.kind() == ErrorKind::Deadlock && !asking.principal.may_see("") {
                    problem.detail = "this claim gave way, because agents wait for each other; \
                                      release what you hold before you ask again"
                        .into();
                }
                problem
            }
            _ => gone("released", "it was released; claim it under a new id"),
        }
    }

    pub(super) async fn claim(&self, asking: &Asking, asked: MakeClaim) -> Answered {
        let name = Name::new(&asked.name)?;
        if !asking.principal.may_use(name.as_str()) {
            let refused = Problem::forbidden("you may not use this name");
            return Err(refused.about(name.as_str()));
        }
        wire::passable(&self.client.capability())?;
        asked.check().map_err(Problem::bad_request)?;
        let ask =
            wire::ask(asked.mode, asked.weight, asked.capacity).map_err(Problem::bad_request)?;
        let id = asked
            .id
            .clone()
            .unwrap_or_else(|| secret()[..32].to_owned());
        wire::check_id("id", &id).map_err(Problem::bad_request)?;
        // Before it enters: a refusal leaves nothing behind.
        let counted = self.sessions.counters.waiting(&asking.principal)?;
        if asking.headers.contains_key(SESSION) {
            let session = self.session(asking)?;
            let wait = wait(&session, asked.wait.as_deref())?;
            let claim = self.enter(asking, &session, id, (name, ask), &asked)?;
            // Thousands may wait, each with a document.
            drop(asked);
            let waits = (wait, true, counted);
            return self.wait(asking, &session, &claim, waits).await;
        }
        // A client without a session gets one, and its secret.
        let asked_wait = asked.wait.as_deref();
        let asked_wait = asked_wait.map_or(Ok(Duration::ZERO), |wait| duration("wait", wait))?;
        let ttl = CURL_TTL.max(asked_wait.saturating_mul(3));
        let ttl = self.sessions.counters.ttl(None, ttl)?;
        let ttl = self.client.capability().explicit_ttl(ttl)?;
        let principal = &asking.principal;
        let (session, secret) = self.sessions.open(principal, &self.client, ttl, None)?;
        let entered = async {
            let wait = wait(&session, asked.wait.as_deref())?;
            let claim = self.enter(asking, &session, id, (name, ask), &asked)?;
            drop(asked);
            let waits = (wait, true, counted);
            self.wait(asking, &session, &claim, waits).await
        };
        match entered.await {
            Ok(mut answer) => {
                answer.add("session", self.opened(asking, &session, &secret));
                Ok(answer)
            }
            Err(problem) => {
                let all = Arc::clone(&self.sessions);
                tokio::spawn(async move { all.end(&session, "claim refused").await });
                Err(problem)
            }
        }
    }

    /// The claim with this id: an earlier one, or a new one.
    fn enter(
        &self,
        asking: &Asking,
        session: &Arc<Session>,
        id: String,
        (name, ask): (Name, Ask),
        document: &MakeClaim,
    ) -> Result<Known, Problem> {
        let asked = Asked {
            name,
            ask,
            queue: document.queue,
            value: document.value.clone(),
            agent: document.agent.as_ref().map(|agent| agent.name().to_owned()),
        };
        let until = self.sessions.extend(session, asking.arrival)?;
        let may_claim = self.sessions.may_claim(session);
        session.claim_or_start(&id, &asked, || {
            let Some(until) = until.filter(|_| may_claim) else {
                return Err(Problem::draining());
            };
            let owner = owner(asking, session, document);
            let bytes = asked.value.as_ref().map_or(0, String::len) + owner.to_json().len();
            let counters = &self.sessions.counters;
            let (counted, remembered) = counters.claim(&asking.principal, bytes)?;
            let client = match &document.agent {
                None => session.client.clone(),
                Some(agent) => agent.of(&session.client),
            };
            let mut request = client.line(&asked.name, ask).ttl(session.ttl);
            if let Some(value) = &asked.value {
                request = request.value(value.clone());
            }
            let queue = asked.queue != Some(false);
            let claim_id = session.claim_id(&id);
            let entry = request.entry(claim_id, owner, queue)?;
            let span = asking.span.as_deref();
            let span = Mutex::new(self.spans.claim(span, &asked.name, claim_id));
            let told = {
                let session = Arc::clone(session);
                // The first counts until it has no place, the second until it is forgotten.
                let counted = Mutex::new(Some((counted, remembered)));
                move |claim: &Claim, told: Told<'_>| match told {
                    Told::Stage(stage) => {
                        if (matches!(stage, Stage::Held { .. }) || stage.is_over())
                            && let Some(span) = span.lock().take()
                        {
                            span.settled(stage);
                        }
                        let (id, state) = (claim.id.clone(), stage.word());
                        // Nobody may be reading.
                        let _ = session.changes.send(Change { id, state });
                    }
                    Told::Ended(stage) => {
                        if let Some((_, remembered)) = counted.lock().take() {
                            session.bury(claim, stage, remembered);
                        }
                    }
                }
            };
            let asked = asked.clone();
            Ok(Claim::start(
                &self.client,
                (id.clone(), claim_id, asked),
                entry,
                until,
                told,
            ))
        })
    }

    pub(super) async fn wait_on(&self, asking: &Asking, asked: wire::WaitFor) -> Answered {
        let (session, claim) = self.live(asking, &asked.id)?;
        let wait = wait(&session, asked.wait.as_deref())?;
        let keep = asked.keep.unwrap_or(true);
        let known = Known::Live(claim);
        let counted = self.sessions.counters.waiting(&asking.principal)?;
        let waits = (wait, keep, counted);
        self.wait(asking, &session, &known, waits).await
    }

    async fn wait(
        &self,
        asking: &Asking,
        session: &Session,
        known: &Known,
        (wait, keep, _counted): (Duration, bool, Counted),
    ) -> Answered {
        let claim = match known {
            Known::Live(claim) => claim,
            Known::Over(over) => return Err(self.over(asking, over)),
        };
        if let Some(until) = self.sessions.extend(session, asking.arrival)?
            && keep
        {
            claim.extend(until);
        }
        let mut stage = claim.settled(asking.arrival + wait).await;
        if matches!(stage, Stage::Entering(None)) {
            // It does not wait for others yet: the engine's first answer is outstanding.
            stage = claim.answered(BootTime::now() + ENGINE_TIME).await;
        }
        if matches!(stage, Stage::Waiting) && claim.asked.queue.is_none() {
            claim.order(Order::GiveUp);
            claim.settled(BootTime::now() + ENGINE_TIME).await;
        }
        self.answer_about(asking, session, claim)
    }

    pub(super) async fn amend(&self, asking: &Asking, asked: wire::Amend) -> Answered {
        let (session, claim) = self.live(asking, &asked.id)?;
        let amendment = match (asked.mode, asked.value) {
            (Some(mode @ (wire::Mode::Exclusive | wire::Mode::Shared)), None) => {
                let ask = wire::ask(Some(mode), None, None).map_err(Problem::bad_request)?;
                self.client.capability().allows(ask)?;
                Amendment::Ask(ask)
            }
            (None, Some(value)) if value.len() <= wire::LONGEST_VALUE => Amendment::Value(value),
            _ => {
                let detail = "give a value of at most 64 KiB, or the mode exclusive or shared";
                return Err(Problem::bad_request(detail));
            }
        };
        if !claim.is_held() {
            if claim.stage().is_over() {
                return self.answer_about(asking, &session, &claim);
            }
            let detail = "only what is held can be amended";
            return Err(Problem::new(StatusCode::CONFLICT, "not_held", detail));
        }
        if let Some(until) = self.sessions.extend(&session, asking.arrival)? {
            claim.extend(until);
        }
        let (answer, answered) = oneshot::channel();
        claim.order(Order::Amend(amendment, answer));
        match answered.await {
            Ok(Ok(Amended::Busy)) => {
                let detail = "others hold too; nothing was changed";
                Err(Problem::new(StatusCode::CONFLICT, "busy", detail))
            }
            Ok(Ok(Amended::Gone)) => {
                let detail = "it is not in the line any more";
                Err(Problem::new(StatusCode::GONE, "lost", detail))
            }
            Ok(Err(error)) => Err(error.into()),
            // Done, or over meanwhile.
            Ok(Ok(Amended::Done)) | Err(_) => self.answer_about(asking, &session, &claim),
        }
    }

    pub(super) async fn release(&self, asking: &Asking, asked: wire::Release) -> Answered {
        wire::check_id("id", &asked.id).map_err(Problem::bad_request)?;
        let session = self.session(asking)?;
        let Some(known) = session.claim(&asked.id) else {
            // The claim may still be in flight.
            let remembered = self.sessions.counters.remembered(&asking.principal)?;
            session.left_before(&asked.id, remembered);
            return Err(no_claim());
        };
        self.sessions.extend(&session, asking.arrival)?;
        let over = match known {
            Known::Over(over) => over,
            Known::Live(claim) => {
                let (answer, answered) = oneshot::channel();
                claim.order(Order::Release(answer));
                match answered.await {
                    Ok(Err(error)) if error.kind() != ErrorKind::Lost => return Err(error.into()),
                    // Released or lost; a dropped answer means that it was over before.
                    _ => claim.over().await,
                }
            }
        };
        match over {
            Stage::Lost(_) | Stage::Evicted => Err(self.over(asking, &over)),
            _ => {
                let answer = json!({"id": asked.id, "state": "released"});
                Ok(reply(StatusCode::OK, &answer))
            }
        }
    }
}

fn no_claim() -> Problem {
    let detail = "this session has no claim of this id, or it was over long ago";
    Problem::new(StatusCode::GONE, "no_claim", detail)
}

/// How long a request of this session may wait.
fn wait(session: &Session, wait: Option<&str>) -> Result<Duration, Problem> {
    let wait = wait.map_or(Ok(Duration::ZERO), |wait| duration("wait", wait))?;
    let longest = session.longest_wait();
    if wait > longest {
        return Err(Problem::bad_request(format!(
            "a request may wait for {} in this session (a third of its ttl, at most 50s); \
             ask with queue, then wait again",
            palisade::command::rounded(longest)
        )));
    }
    Ok(wait)
}

/// The owner record for the engine: what the client gave, and the principal.
fn owner(asking: &Asking, session: &Session, asked: &MakeClaim) -> Owner {
    let mut owner = match &asked.owner {
        Some(wire::OwnerField::Record(record)) => Owner::clone(record),
        Some(wire::OwnerField::Handle(handle)) => Owner::here(handle, None),
        None => Owner::here(&session.id, None),
    };
    owner.label = asked.label.clone().or(owner.label.take());
    owner.principal = Some(asking.principal.name.clone());
    let trace = asking.headers.get(TRACE);
    let trace = trace.and_then(|trace| trace.to_str().ok());
    let said = owner.traceparent.take();
    let said = said.filter(|said| wire::is_traceparent(said));
    let trace = trace.filter(|trace| wire::is_traceparent(trace));
    owner.traceparent = trace.map(str::to_owned).or(said);
    owner
}
