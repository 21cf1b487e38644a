//! `palisade queue push`: adds a message, or one for each line.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use palisade::command::parse_duration;
use palisade::queue::{Draft, MAX_BATCH, MAX_BODY, Pushed};
use palisade::{Error, Name};
use serde_json::json;

use super::refuse_private;
use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
use crate::print::Printer;

/// Add a message to a queue, and print its id
///
/// It returns when the message is stored as durably as the engine allows: on disk with file: and
/// PostgreSQL.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        palisade queue push mail --body ann@example.org\n  \
        echo ann@example.org | palisade queue push mail\n  \
        palisade queue push orders order.json --key customer-17 --id order-4711\n  \
        seq 1000 | palisade queue push numbers --lines\n\n\
        After exit code 69 (unreachable) the message may have been stored: with --id it can be\n\
        pushed again.")]
pub(super) struct Push {
    /// The name of the queue
    name: String,
    /// The file with the message [default: -, which is stdin]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The message itself, instead of a file
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with_all = ["file", "lines"])]
    body: Option<OsString>,
    /// Handle it after all earlier messages of this key, never at the same time as one
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// The id of the message: pushed again with the same id within 24 hours, it is stored once
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Deliver it only after this time
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    delay: Option<Duration>,
    /// Make a message of each line
    #[arg(long, conflicts_with = "id")]
    lines: bool,
}

impl Push {
    pub(super) async fn run(self, global: &Global) -> Verdict {
        Name::new(&self.name)?;
        for (flag, value) in [("--id", &self.id), ("--key", &self.key)] {
            let read = value.as_ref().map(Name::new).transpose();
            read.map_err(|error| {
                let message = format!("{flag}: {}", error.message());
                Error::new(error.kind(), "push", message)
            })?;
        }
        let target = Target::find(global)?;
        refuse_private(&target)?;
        let input = self.input(global.printer())?;
        let client = palisade::connect(target.url()).await?;
        let queue = client.queue(&self.name);
        if !self.lines {
            let mut body = Vec::new();
            // One byte more shows that the message is too long, without reading all of it.
            let read = input.take(MAX_BODY as u64 + 1).read_to_end(&mut body);
            read.map_err(|error| unreadable(&error))?;
            let Pushed { id, duplicate, .. } = queue.push(self.draft(body)).await?;
            let answer = json!({"queue": self.name, "id": id, "duplicate": duplicate});
            client.close().await;
            if duplicate && !global.json {
                let note = format!("{id} was pushed before; nothing was stored");
                global.printer().event(answer.clone(), || Some(note));
            }
            global.printer().answer(&answer, |_| format!("{id}\n"))?;
            return Ok(Outcome::Done);
        }
        let mut pushed = 0;
        let mut lines = io::BufRead::split(io::BufReader::new(input), b'\n');
        loop {
            let some = lines.by_ref().take(MAX_BATCH);
            let some = some.collect::<io::Result<Vec<_>>>();
            let some = some.map_err(|error| unreadable(&error))?;
            if some.is_empty() {
                break;
            }
            pushed += some.len();
            let drafts = some.into_iter().map(|line| self.draft(line));
            queue.push_all(drafts).await?;
        }
        client.close().await;
        let answer = json!({"queue": self.name, "pushed": pushed});
        let text = |_: &_| format!("{pushed} messages\n");
        global.printer().answer(&answer, text)?;
        Ok(Outcome::Done)
    }

    fn input(&self, printer: Printer) -> Result<Box<dyn Read>, Failure> {
        if let Some(body) = &self.body {
            return Ok(Box::new(io::Cursor::new(body.as_bytes().to_vec())));
        }
        match &self.file {
            Some(path) if path.as_os_str() != "-" => match File::open(path) {
                Ok(file) => Ok(Box::new(file)),
                Err(error) => {
                    let path = path.display();
                    let tip = match error.kind() {
                        io::ErrorKind::NotFound => {
                            "; the message is read from this file: to push the text itself, write \
                             it after --body"
                        }
                        _ => "",
                    };
                    Err(Failure::Usage(format!("{path}: {error}{tip}")))
                }
            },
            _ => {
                let stdin = io::stdin();
                if stdin.is_terminal() && !printer.json {
                    let text = "reading the message from the terminal; Ctrl-D on a line of its own \
                                ends it";
                    printer.event(json!(null), || Some(text.to_owned()));
                }
                Ok(Box::new(stdin.lock()))
            }
        }
    }

    fn draft(&self, body: Vec<u8>) -> Draft {
        let mut draft = Draft::new(body);
        draft.key = self.key.clone();
        draft.id = self.id.clone();
        draft.delay(self.delay.unwrap_or_default())
    }
}

fn unreadable(error: &io::Error) -> Failure {
    Failure::Usage(format!("the message can't be read: {error}"))
}
