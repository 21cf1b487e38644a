//! Lines as they change, for `ls --watch` and `top`.
//!
//! Notifications of the engine trigger a survey; a survey each second makes up for lost ones and
//! updates ages. An engine that can't be reached is retried as often. The feed is a task of its
//! own, so that a listener may be cancelled at any time and miss nothing.

use std::time::Duration;

use futures_util::StreamExt;
use palisade::Client;
use palisade::report::{Deadlock, LineReport, Scope, Sightings, find};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::connect::Target;
use crate::exit::{Failure, told};
use crate::print::Printer;
use crate::view::LineView;

/// The longest interval between two surveys.
const RECHECK: Duration = Duration::from_secs(1);

/// The shortest interval between two surveys: faster changes are shown as one.
const CALM: Duration = Duration::from_millis(100);

/// The interval for checking whether stdout is still read.
const READER_CHECK: Duration = Duration::from_millis(500);

/// The result of a survey.
#[derive(Default)]
pub(crate) struct Sight {
    pub(crate) lines: Vec<LineView>,
    /// The deadlocks that the previous survey showed, too.
    pub(crate) deadlocks: Vec<Deadlock>,
}

/// A survey, or why it failed.
pub(crate) type Seen = Result<Sight, Failure>;

/// Connects for reading. It waits for an embedded store that does not exist yet, and does not
/// create it.
pub(crate) async fn connect(target: &Target) -> Result<Client, Failure> {
    loop {
        if let Some(client) = target.connect_existing().await? {
            return Ok(client);
        }
        sleep(RECHECK).await;
    }
}

/// Surveys the lines of `scope`, now and whenever they may have changed.
///
/// # Errors
/// When the engine can't be connected to at first.
pub(crate) async fn feed(target: Target, scope: Scope) -> Result<mpsc::Receiver<Seen>, Failure> {
    let (sender, receiver) = mpsc::channel(1);
    let existing = target.connect_existing().await?;
    tokio::spawn(async move {
        let client = match existing {
            Some(client) => client,
            None => {
                if sender.send(Ok(Sight::default())).await.is_err() {
                    return;
                }
                match connect(&target).await {
                    Ok(client) => client,
                    Err(failure) => return drop(sender.send(Err(failure)).await),
                }
            }
        };
        // Opened before the first survey, so that no change is missed in between.
        let mut changes = client.engine().watch(scope.clone());
        let mut sightings = Sightings::default();
        loop {
            let seen = see(&client, &scope, &mut sightings).await;
            if sender.send(seen).await.is_err() {
                return;
            }
            sleep(CALM).await;
            let hint = timeout(RECHECK - CALM, changes.next()).await;
            if matches!(hint, Ok(None | Some(Err(_)))) {
                sleep(RECHECK - CALM).await;
            }
        }
    });
    Ok(receiver)
}

/// Watches an engine; reports once that it can't be reached, and retries.
pub(crate) struct Outages<'a> {
    printer: Printer,
    name: Option<&'a str>,
    pub(crate) out: bool,
}

impl<'a> Outages<'a> {
    pub(crate) fn new(printer: Printer, name: Option<&'a str>) -> Self {
        let out = false;
        Self { printer, name, out }
    }

    /// The next survey; `None` while the engine can't be reached.
    pub(crate) fn see<T>(
        &mut self,
        seen: Option<Result<T, Failure>>,
    ) -> Result<Option<T>, Failure> {
        let seen = seen.ok_or_else(|| Failure::Defect("the watch has ended".into()))?;
        let error = match seen {
            Err(Failure::Library(error)) if error.is_transient() => error,
            seen => {
                self.out = false;
                return seen.map(Some);
            }
        };
        if !std::mem::replace(&mut self.out, true) {
            let message = told(&error);
            let mut event = json!({"event": "unreachable", "message": message});
            if let Some(name) = self.name {
                event["name"] = name.into();
            }
            self.printer
                .event(event, || Some(format!("waiting for the engine: {message}")));
        }
        Ok(None)
    }
}

async fn see(client: &Client, scope: &Scope, sightings: &mut Sightings) -> Seen {
    let reports = client.survey(scope.clone()).await?;
    let deadlocks = sightings.confirm(find(&reports));
    let lines = views(client, reports)?;
    Ok(Sight { lines, deadlocks })
}

/// The lines of `scope`.
pub(crate) async fn look(client: &Client, scope: &Scope) -> Result<Vec<LineView>, Failure> {
    views(client, client.survey(scope.clone()).await?)
}

fn views(client: &Client, reports: Vec<LineReport>) -> Result<Vec<LineView>, Failure> {
    let views = reports.into_iter();
    views.map(|report| LineView::new(report, client)).collect()
}

/// Returns when our stdout is a pipe whose other end is closed. A watch without output would not
/// notice that otherwise.
pub(crate) async fn reader_gone() {
    loop {
        let stdout = rustix::stdio::stdout();
        let mut files = [PollFd::new(&stdout, PollFlags::empty())];
        let asked = poll(&mut files, Some(&Timespec::default()));
        if asked.is_ok() && files[0].revents().contains(PollFlags::ERR) {
            return;
        }
        sleep(READER_CHECK).await;
    }
}
