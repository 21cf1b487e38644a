//! `palisade queue ls` and `show`: queues, and the messages in one.

use std::io::IsTerminal;
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use humantime::format_rfc3339_millis;
use palisade::Client;
use palisade::queue::{MessageReport, QueueReport};
use palisade::report::Scope;
use serde::Serialize;

use super::{existing, refuse_private};
use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
use crate::print;
use crate::table::{self, Layout};
use crate::view::{brief, shown};

/// List queues: how many messages are ready, delayed, claimed, blocked or dead
///
/// Delayed messages wait for a time that their sender set, or for their next attempt after a
/// failure. Blocked messages wait behind another of their key. Dead letters have used up their
/// attempts: `palisade queue show NAME --dead` lists them, `retry` makes them ready again and
/// `drop` removes them.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  palisade queue ls\n  palisade queue ls mail --json")]
pub(super) struct Ls {
    /// Only names that begin with this
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
}

/// A queue; the field names are the command's contract.
#[derive(Serialize)]
struct QueueView {
    name: String,
    ready: u64,
    delayed: u64,
    claimed: u64,
    blocked: u64,
    dead: u64,
    oldest_ms: Option<u64>,
}

impl QueueView {
    fn new(report: QueueReport) -> Self {
        Self {
            ready: report.ready,
            delayed: report.delayed,
            claimed: report.claimed,
            blocked: report.blocked,
            dead: report.dead,
            oldest_ms: report.oldest.map(|oldest| oldest.as_millis() as u64),
            name: report.name,
        }
    }

    fn row(&self) -> [String; 7] {
        let oldest = self.oldest_ms.map(Duration::from_millis);
        [
            shown(&self.name),
            self.ready.to_string(),
            self.delayed.to_string(),
            self.claimed.to_string(),
            self.blocked.to_string(),
            self.dead.to_string(),
            oldest.map_or_else(|| "-".to_owned(), brief),
        ]
    }
}

impl Ls {
    pub(super) async fn run(self, global: &Global) -> Verdict {
        let target = Target::find(global)?;
        refuse_private(&target)?;
        let reports = match target.connect_existing().await? {
            Some(client) => client.survey_queues(Scope::Prefix(self.prefix)).await?,
            None => Vec::new(),
        };
        let views: Vec<QueueView> = reports.into_iter().map(QueueView::new).collect();
        let header = [
            "NAME", "READY", "DELAYED", "CLAIMED", "BLOCKED", "DEAD", "OLDEST",
        ];
        let layout = Layout {
            less: &[6, 2, 4, 3],
            long: [0, 6],
            shortest: 12,
            right: &[1, 2, 3, 4, 5],
        };
        let text = |views: &Vec<QueueView>| match views.is_empty() {
            true if std::io::stdout().is_terminal() => "no queues\n".to_owned(),
            true => String::new(),
            false => rows(header, views.iter().map(QueueView::row), &layout),
        };
        global.printer().reply(&views, text, true)
    }
}

/// A table with this header.
fn rows<const N: usize>(
    header: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    layout: &Layout,
) -> String {
    let cells = std::iter::once(header.map(str::to_owned)).chain(rows);
    let rows = table::rows(cells.collect(), layout, print::width());
    rows.into_iter().map(|row| row + "\n").collect()
}

/// Show the messages of a queue, or one of them with its body; exit code 1 if there is none
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        palisade queue show mail\n  \
        palisade queue show mail --dead --json\n  \
        palisade queue show orders order-4711 --body > order.json")]
pub(super) struct Show {
    /// The name of the queue
    name: String,
    /// The id of one message
    id: Option<String>,
    /// Show only dead letters
    #[arg(long, conflicts_with = "id")]
    dead: bool,
    /// The maximum number of messages, the oldest first
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,
    /// Write only the body of the message, as it is
    #[arg(long, requires = "id")]
    body: bool,
}

/// A message; the field names are the command's contract.
#[derive(Serialize)]
struct MessageView {
    id: String,
    key: Option<String>,
    state: &'static str,
    attempts: u32,
    pushed: String,
    changes_in_ms: Option<u64>,
    token: Option<String>,
    owner: Option<String>,
    host: Option<String>,
    pid: Option<u32>,
    why: Option<String>,
    size: u64,
}

/// A message with its body.
#[derive(Serialize)]
struct FullView {
    #[serde(flatten)]
    message: MessageView,
    /// `None` if it is not UTF-8.
    body: Option<String>,
    /// A body that is not UTF-8.
    body_base64: Option<String>,
}

impl MessageView {
    fn new(report: MessageReport, client: &Client) -> Result<Self, Failure> {
        let token = report.sequence.map(|sequence| client.token(sequence));
        // RFC 3339 has no form for years after 9999.
        let pushed = Duration::from_millis(report.pushed.min(253_402_300_799_000));
        let owner = report.owner.as_ref();
        Ok(Self {
            state: report.state.code(),
            attempts: report.attempts,
            pushed: format_rfc3339_millis(UNIX_EPOCH + pushed).to_string(),
            changes_in_ms: report.changes_in.map(|left| left.as_millis() as u64),
            token: token.transpose()?.map(|token| token.to_string()),
            owner: owner.map(|owner| owner.owner.clone()),
            host: owner.map(|owner| owner.host.clone()),
            pid: owner.map(|owner| owner.pid),
            why: report.why,
            size: report.size,
            id: report.id,
            key: report.key,
        })
    }

    fn row(&self) -> [String; 7] {
        let dash = || "-".to_owned();
        let left = self.changes_in_ms.map(|left| left.div_ceil(1000));
        [
            shown(&self.id),
            self.state.to_owned(),
            self.key.as_deref().map_or_else(dash, shown),
            self.attempts.to_string(),
            left.map_or_else(dash, |left| brief(Duration::from_secs(left))),
            self.size.to_string(),
            self.why.as_deref().map_or_else(dash, shown),
        ]
    }
}

impl Show {
    pub(super) async fn run(self, global: &Global) -> Verdict {
        let Some((client, queue)) = existing(global, &self.name).await? else {
            return self.nothing(global);
        };
        if let Some(id) = &self.id {
            let Some((report, body)) = queue.read(id).await? else {
                return self.nothing(global);
            };
            if self.body {
                use std::io::Write;
                let mut out = std::io::stdout().lock();
                out.write_all(&body)?;
                out.flush()?;
                return Ok(Outcome::Done);
            }
            let message = MessageView::new(report, &client)?;
            let (body, body_base64) = match String::from_utf8(body) {
                Ok(text) => (Some(text), None),
                Err(bytes) => (None, Some(BASE64_STANDARD.encode(bytes.as_bytes()))),
            };
            let view = FullView {
                message,
                body,
                body_base64,
            };
            return global.printer().reply(&view, described, true);
        }
        let reports = queue.list(self.dead, self.limit).await?;
        let views = reports
            .into_iter()
            .map(|report| MessageView::new(report, &client));
        let views = views.collect::<Result<Vec<_>, Failure>>()?;
        if views.is_empty() {
            return self.nothing(global);
        }
        let header = ["ID", "STATE", "KEY", "TRIES", "IN", "BYTES", "WHY"];
        let layout = Layout {
            less: &[5, 4, 2],
            long: [0, 6],
            shortest: 16,
            right: &[3, 5],
        };
        let text =
            |views: &Vec<MessageView>| rows(header, views.iter().map(MessageView::row), &layout);
        global.printer().reply(&views, text, true)
    }

    fn nothing(&self, global: &Global) -> Verdict {
        let none: [MessageView; 0] = [];
        let text = match &self.id {
            Some(id) => format!("no message {} in {}\n", shown(id), shown(&self.name)),
            None if self.dead => format!("no dead letters in {}\n", shown(&self.name)),
            None => format!("no messages in {}\n", shown(&self.name)),
        };
        if self.id.is_some() {
            return global
                .printer()
                .reply(&None::<MessageView>, |_| text, false);
        }
        global.printer().reply(&none, |_| text, false)
    }
}

/// One message as text.
fn described(view: &FullView) -> String {
    let mut text = String::new();
    let mut line = |what: &str, said: &str| text.push_str(&format!("{what:<9}{}\n", shown(said)));
    let message = &view.message;
    line("id", &message.id);
    line("state", message.state);
    if let Some(key) = &message.key {
        line("key", key);
    }
    line("tries", &message.attempts.to_string());
    line("pushed", &message.pushed);
    if let Some(left) = message.changes_in_ms {
        line("in", &brief(Duration::from_secs(left.div_ceil(1000))));
    }
    if let (Some(host), Some(pid), Some(token)) = (&message.host, message.pid, &message.token) {
        line("claimed", &format!("by {host}, pid {pid} (token {token})"));
    }
    if let Some(why) = &message.why {
        line("why", why);
    }
    line("bytes", &message.size.to_string());
    text.push('\n');
    match &view.body {
        Some(body) => body
            .lines()
            .for_each(|line| text.push_str(&format!("{}\n", shown(line)))),
        None => text.push_str("(not UTF-8 text: --body writes it as it is)\n"),
    }
    text
}
