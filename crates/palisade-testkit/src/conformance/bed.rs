//! `Bed`: what a case lies on. A fresh random namespace on one engine, with clients, claims,
//! times that the engine can keep, and second processes.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use palisade::Client;
use palisade::core::capability::Capability;
use palisade::core::claim::{Ask, Claim, ClaimId};
use palisade::core::clock::BootTime;
use palisade::core::dyn_engine::SharedEngine;
use palisade::core::engine::{Engine, Entered, Place, Renewal};
use palisade::core::name::Name;
use palisade::core::owner::Owner;
use palisade::core::report::{LineReport, Scope};
use palisade::core::ticket::{Lease, LeaseStart, Ticket};
use palisade::core::url::{Settings, Url};
use parking_lot::Mutex;

use super::Failure;
use super::failure::inside;
use crate::proxy::Proxies;
use crate::subject::{Site, Subject};
use crate::taker::{Second, Taker, TakerArgs};
use crate::wrap::Spy;

/// How long an event may take that is due at once. Far more than it takes on a quiet machine, and
/// far less than a trial may last.
pub const SOON: Duration = Duration::from_secs(5);

/// How long one call of `wait` sleeps at the most; clients look at least this often too.
pub(super) const RECHECK: Duration = Duration::from_secs(1);

/// Waits for `future`, and fails by name when it takes longer than `limit`.
///
/// # Errors
/// A failure that says what did not happen.
#[track_caller]
pub fn within<F: Future>(
    limit: Duration,
    what: &str,
    future: F,
) -> impl Future<Output = Result<F::Output, Failure>> {
    let late = Failure::new(format!("{what} did not happen within {limit:?}"));
    async move { tokio::time::timeout(limit, future).await.map_err(|_| late) }
}

/// One case's place on one engine.
#[derive(Clone)]
pub struct Bed(Arc<Inner>);

struct Inner {
    subject: Subject,
    site: Site,
    url: String,
    program: PathBuf,
    client: Client,
    notes: Arc<Mutex<Vec<(String, f64)>>>,
}

/// A claim in a line, as the engine answered.
#[derive(Debug, Clone)]
pub(crate) struct Seated {
    pub(crate) ticket: Ticket,
    pub(crate) armed: LeaseStart,
    pub(crate) place: Place,
}

impl Seated {
    /// The count of its grant, 0 while it waits.
    pub(crate) fn sequence(&self) -> u64 {
        match self.place {
            Place::Held { sequence } => sequence,
            _ => 0,
        }
    }

    /// What to renew for it.
    pub(crate) fn lease(&self) -> Lease {
        Lease::in_a_test(&self.ticket)
    }

    /// Fails as not applicable when its lease is shared with other tickets.
    pub(crate) fn must_own_lease(&self) -> Result<(), Failure> {
        match self.ticket.has_own_lease() {
            true => Ok(()),
            false => Err(Failure::not_applicable("tickets share a lease")),
        }
    }
}

impl Bed {
    /// A bed with a namespace of its own. `program` is run for second processes.
    ///
    /// # Errors
    /// When the engine can't be connected to.
    pub async fn new(
        subject: Subject,
        site: Site,
        program: PathBuf,
        notes: Arc<Mutex<Vec<(String, f64)>>>,
    ) -> palisade::Result<Self> {
        let url = with_option(
            &site.url,
            "namespace",
            &format!("t{:016x}", rand::random::<u64>()),
        );
        let client = (subject.connect)(url.clone()).await?;
        Ok(Self(Arc::new(Inner {
            subject,
            site,
            url,
            program,
            client,
            notes,
        })))
    }

    /// The engine's URL with this bed's namespace.
    pub fn url(&self) -> &str {
        &self.0.url
    }

    /// The same URL with another option.
    pub fn url_with(&self, option: &str, value: &str) -> String {
        with_option(self.url(), option, value)
    }

    /// Where the engine is.
    pub fn site(&self) -> &Site {
        &self.0.site
    }

    /// What the engine can do.
    pub fn capability(&self) -> Capability {
        self.0.client.capability()
    }

    /// The bed's own client.
    pub fn client(&self) -> Client {
        self.0.client.clone()
    }

    /// A second, independent client.
    ///
    /// # Errors
    /// When the engine can't be connected to.
    pub async fn other_client(&self) -> palisade::Result<Client> {
        self.client_of(self.url()).await
    }

    /// A client of another URL on the same engine.
    ///
    /// # Errors
    /// When the engine can't be connected to.
    pub async fn client_of(&self, url: &str) -> palisade::Result<Client> {
        (self.0.subject.connect)(url.to_owned()).await
    }

    /// A client through a wrapper, which loses or counts calls, around an engine of its own.
    ///
    /// # Errors
    /// When the engine can't be connected to.
    pub async fn spied_client(&self) -> palisade::Result<(Arc<Spy>, Client)> {
        // Nothing is acquired through the client below, so that its keeper never listens.
        let engine = Arc::clone(self.other_client().await?.engine());
        let spy = Arc::new(Spy::new(engine));
        let client = Client::new(spy.clone(), &self.settings()?)?;
        Ok((spy, client))
    }

    /// A client behind fault proxies of its own, which trouble no other case.
    ///
    /// # Errors
    /// When the engine can't be connected to.
    pub async fn proxied_client(&self) -> Result<(Proxies, Client), Failure> {
        let proxies = Proxies::before(self.url())?;
        let client = self.client_of(proxies.url()).await?;
        Ok((proxies, client))
    }

    /// The settings in the bed's URL.
    ///
    /// # Errors
    /// When the URL can't be read.
    pub fn settings(&self) -> palisade::Result<Settings> {
        Url::parse(self.url())?.take_settings()
    }

    /// The engine of the bed's own client.
    pub fn engine(&self) -> &SharedEngine {
        self.0.client.engine()
    }

    /// A second process, waiting for or holding `name`.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn taker(&self, name: &Name, args: TakerArgs) -> std::io::Result<Taker> {
        self.second().taker(self.url(), name.as_str(), &args)
    }

    /// How second processes are started.
    pub fn second(&self) -> Second {
        Second {
            program: self.0.program.clone(),
            subject: self.0.subject.name,
        }
    }

    /// Adds a measured number to the report of this case.
    pub fn note(&self, what: &str, value: f64) {
        self.0.notes.lock().push((what.to_owned(), value));
    }

    /// A name in this bed. Constant names can't be wrong.
    ///
    /// # Errors
    /// When the name is not valid.
    pub fn name(&self, name: &str) -> palisade::Result<Name> {
        Name::new(name)
    }

    /// A ttl so long that no case sees its end.
    pub fn long_ttl(&self) -> Duration {
        self.fit(Duration::from_secs(60))
    }

    /// A ttl whose end a case can wait for.
    pub fn short_ttl(&self) -> Duration {
        self.fit(Duration::from_millis(600))
    }

    /// `ttl` moved into the engine's range and up to its step.
    pub fn fit(&self, ttl: Duration) -> Duration {
        let range = self.capability().ttl;
        let ttl = ttl.clamp(range.min, range.max);
        self.capability().explicit_ttl(ttl).unwrap_or(range.max)
    }

    /// A claim that queues and lasts long.
    pub fn claim(&self, name: &Name, ask: Ask) -> Claim {
        Claim {
            id: ClaimId::random(),
            name: name.clone(),
            ask,
            ttl: self.long_ttl(),
            queue: true,
            owner: Owner::here(self.0.client.owner(), None),
            value: None,
            renewed: true,
            at_least: Duration::ZERO,
        }
    }

    /// Enters, and expects a place.
    pub(crate) async fn enter(&self, claim: Claim) -> Result<Seated, Failure> {
        enter_on(self.engine(), claim).await
    }

    /// Enters `name` with a claim that lasts long, and expects to hold.
    pub(crate) async fn hold(&self, name: &Name, ask: Ask) -> Result<Seated, Failure> {
        let seated = self.enter(self.claim(name, ask)).await?;
        inside!(seated.place, Place::Held { .. } => (), "{ask:?} holds at once");
        Ok(seated)
    }

    /// Enters `name` with a claim that lasts long, and expects to wait.
    pub(crate) async fn queue(&self, name: &Name, ask: Ask) -> Result<Seated, Failure> {
        let seated = self.enter(self.claim(name, ask)).await?;
        inside!(seated.place, Place::Waiting => (), "{ask:?} waits");
        Ok(seated)
    }

    /// Enters without queueing and expects `Busy`.
    pub(crate) async fn is_busy(&self, name: &Name, ask: Ask) -> Result<(), Failure> {
        let claim = Claim {
            queue: false,
            ..self.claim(name, ask)
        };
        let entered = self.engine().enter(Arc::new(claim)).await?;
        inside!(entered, Entered::Busy => Ok(()), "a line in use is busy")
    }

    /// Waits until the ticket holds, and gives its count.
    pub(crate) async fn granted(&self, seated: &Seated) -> Result<u64, Failure> {
        granted_on(self.engine(), &seated.ticket, SOON).await
    }

    /// Renews one lease.
    pub(crate) async fn renew(&self, seated: &Seated) -> Result<Renewal, Failure> {
        let mut answers = self
            .engine()
            .renew(vec![seated.lease()], Duration::from_secs(2))
            .await;
        match answers.len() {
            1 => Ok(answers.remove(0)),
            other => Err(Failure::new(format!("one lease, but {other} answers"))),
        }
    }

    /// The line `name` as a survey shows it; empty when it is not shown.
    pub(crate) async fn line(&self, name: &Name) -> Result<LineReport, Failure> {
        let mut lines = self.engine().survey(Scope::Line(name.clone())).await?;
        if lines.len() > 1 {
            return Err(Failure::new(format!(
                "a survey of one line shows {lines:?}"
            )));
        }
        Ok(lines.pop().unwrap_or(LineReport {
            name: name.to_string(),
            capacity: None,
            holders: Vec::new(),
            waiters: Vec::new(),
        }))
    }

    /// Waits until a survey of `name` satisfies `test`: watches, and looks again now and then.
    pub(crate) async fn until(
        &self,
        name: &Name,
        what: &str,
        test: impl Fn(&LineReport) -> bool,
    ) -> Result<LineReport, Failure> {
        let look = async {
            let mut pause = Duration::from_millis(1);
            loop {
                let line = self.line(name).await?;
                if test(&line) {
                    return Ok(line);
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        };
        within(SOON, what, look).await?
    }

    /// Waits until `count` claims wait in the line. Needs visible waiters.
    pub(crate) async fn until_waiting(&self, name: &Name, count: usize) -> Result<(), Failure> {
        let what = format!("a line of {count} waiters");
        let seen = self.until(name, &what, |line| line.waiters.len() == count);
        seen.await.map(drop)
    }

    /// Waits until nobody is in the line.
    pub(crate) async fn until_empty(&self, name: &Name) -> Result<(), Failure> {
        let empty = |line: &LineReport| line.holders.is_empty() && line.waiters.is_empty();
        self.until(name, "an empty line", empty).await.map(drop)
    }
}

/// Enters on any engine, and expects a place.
pub(crate) async fn enter_on(engine: &SharedEngine, claim: Claim) -> Result<Seated, Failure> {
    let entered = within(SOON, "enter", engine.enter(Arc::new(claim))).await??;
    match entered {
        Entered::In {
            ticket,
            armed,
            place,
        } => Ok(Seated {
            ticket,
            armed,
            place,
        }),
        Entered::Busy => Err(Failure::new("a claim that queues finds no place")),
    }
}

/// Waits on any engine until the ticket holds, and gives its count.
pub(crate) async fn granted_on(
    engine: &SharedEngine,
    ticket: &Ticket,
    limit: Duration,
) -> Result<u64, Failure> {
    let grant = async {
        loop {
            let until = BootTime::now() + RECHECK;
            match engine.wait(ticket.clone(), until).await? {
                Place::Held { sequence } => return Ok(sequence),
                Place::Waiting => continue,
                Place::Gone => return Err(Failure::new("a claim that waits is gone")),
            }
        }
    };
    within(limit, "the grant", grant).await?
}

/// The hold, or a failure that says it was busy.
pub(crate) fn held<H>(hold: Option<H>) -> Result<H, Failure> {
    hold.ok_or_else(|| Failure::new("a free lock is busy"))
}

fn with_option(url: &str, option: &str, value: &str) -> String {
    let joint = if url.contains('?') { '&' } else { '?' };
    format!("{url}{joint}{option}={value}")
}
