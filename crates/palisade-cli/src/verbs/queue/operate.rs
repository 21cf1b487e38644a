//! `palisade queue retry` and `drop`, for operators.

use palisade::queue::{Pick, Queue};
use serde_json::json;

use super::existing;
use crate::args::Global;
use crate::exit::{Failure, Verdict};
use crate::view::shown;

/// Make dead letters or delayed messages ready again; exit code 1 if there are none
///
/// They get as many attempts as new messages.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        palisade queue retry mail --dead\n  \
        palisade queue retry orders order-4711")]
pub(super) struct Retry {
    /// The name of the queue
    name: String,
    /// The ids of the messages
    #[arg(required_unless_present = "dead")]
    ids: Vec<String>,
    /// All dead letters
    #[arg(long, conflicts_with = "ids")]
    dead: bool,
}

/// Remove messages without processing them; exit code 1 if there are none
///
/// Messages that a consumer has claimed are kept. With --force they are removed, too: the consumer
/// learns of it, and its command is ended, at its next renewal (after a third of the ttl). The next
/// message of the key may be handled before that.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        palisade queue drop orders order-4711\n  \
        palisade queue drop mail --dead\n  \
        palisade queue drop mail --all")]
pub(super) struct Drop {
    /// The name of the queue
    name: String,
    /// The ids of the messages
    #[arg(required_unless_present_any = ["dead", "all"])]
    ids: Vec<String>,
    /// All dead letters
    #[arg(long, conflicts_with_all = ["ids", "all"])]
    dead: bool,
    /// All messages
    #[arg(long, conflicts_with = "ids")]
    all: bool,
    /// Also remove messages that a consumer has claimed
    #[arg(long)]
    force: bool,
}

impl Retry {
    pub(super) async fn run(self, global: &Global) -> Verdict {
        let picks = picks(self.ids, self.dead, false);
        let retry = async |queue: Queue, pick: Pick| queue.retry(pick).await;
        operate(global, &self.name, picks, "retried", "ready again", retry).await
    }
}

impl Drop {
    pub(super) async fn run(self, global: &Global) -> Verdict {
        let force = self.force;
        let picks = picks(self.ids, self.dead, self.all);
        let drop = async |queue: Queue, pick: Pick| queue.drop_messages(pick, force).await;
        operate(global, &self.name, picks, "dropped", "removed", drop).await
    }
}

fn picks(ids: Vec<String>, dead: bool, all: bool) -> Vec<Pick> {
    match (dead, all) {
        (true, _) => vec![Pick::Dead],
        (_, true) => vec![Pick::All],
        _ => ids.into_iter().map(Pick::Id).collect(),
    }
}

async fn operate(
    global: &Global,
    name: &str,
    picks: Vec<Pick>,
    word: &'static str,
    said: &'static str,
    does: impl AsyncFn(Queue, Pick) -> palisade::Result<u64>,
) -> Result<crate::exit::Outcome, Failure> {
    let mut count = 0;
    if let Some((_client, queue)) = existing(global, name).await? {
        for pick in picks {
            count += does(queue.clone(), pick).await?;
        }
    }
    let answer = json!({"queue": name, word: count});
    let text = |_: &_| match count {
        0 => format!("no such message in {}\n", shown(name)),
        1 => format!("1 message {said}\n"),
        count => format!("{count} messages {said}\n"),
    };
    global.printer().reply(&answer, text, count > 0)
}
