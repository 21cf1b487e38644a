//! The code of the second process: `taker URL NAME …` and `counter URL NAME FILE TIMES …`.

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use palisade::engine::Ask;
use palisade::{BootTime, Hold, Patience};

use super::{Event, TakerArgs, What};
use crate::engine::{CONNECT, Connect, EngineUnderTest, named};

/// The environment variable that names the engine under test to connect to.
pub(crate) const ENGINE: &str = "PALISADE_TEST_ENGINE";

/// How a second process connects: like the engine of `table` that [`ENGINE`] names, else through
/// `palisade::connect`.
pub(crate) fn connect_of(table: &[EngineUnderTest]) -> Connect {
    let name = std::env::var(ENGINE).unwrap_or_default();
    named(table, &name).map_or(CONNECT, |engine| engine.connect)
}

/// Runs a subcommand of the second process if the arguments name one.
pub fn main(arguments: &[String], table: &[EngineUnderTest]) -> Option<ExitCode> {
    let (verb, rest) = arguments.split_first()?;
    let connect = connect_of(table);
    let done = match verb.as_str() {
        "taker" => parse_taker(rest).and_then(|(url, name, args)| {
            block_on(take(connect, &url, &name, args)).map_err(|error| error.to_string())
        }),
        "counter" => parse_counter(rest).and_then(|counter| block_on(count(connect, counter))),
        _ => return None,
    };
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            say(What::Failed, None, None, Some(why.clone()));
            eprintln!("{verb}: {why}");
            ExitCode::FAILURE
        }
    })
}

fn block_on<T>(future: impl Future<Output = Result<T, impl ToString>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    runtime.block_on(future).map_err(|error| error.to_string())
}

fn say(event: What, token: Option<u64>, valid: Option<bool>, detail: Option<String>) {
    let event = Event {
        event,
        at: BootTime::now().as_nanos(),
        token,
        valid,
        detail,
    };
    // If the driver has ended, stdin ends as well, so this failure can be ignored.
    if let Ok(line) = serde_json::to_string(&event) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{line}");
        let _ = out.flush();
    }
}

fn say_of(hold: &Hold, event: What, detail: Option<String>) {
    // Read the validity first, as a holder would.
    let valid = hold.is_valid();
    say(event, Some(hold.token().0), Some(valid), detail);
}

async fn take(connect: Connect, url: &str, name: &str, args: TakerArgs) -> palisade::Result<()> {
    let client = connect(url.to_owned()).await?;
    let mut request = client.line(name, args.ask);
    if let Some(ttl) = args.ttl {
        request = request.ttl(ttl);
    }
    let mut commands = commands();
    say(What::Waiting, None, None, None);
    let acquire = request.acquire(Patience::Forever);
    tokio::pin!(acquire);
    let hold = loop {
        tokio::select! {
            hold = &mut acquire => break hold?,
            command = commands.recv() => if !matches!(command.as_deref(), Some("check")) {
                return Ok(());
            },
        }
    };
    let Some(hold) = hold else { return Ok(()) };
    say_of(&hold, What::Held, None);
    let mut told = false;
    loop {
        tokio::select! {
            loss = hold.lost(), if !told => {
                told = true;
                say_of(&hold, What::Lost, Some(loss.reason.code().to_owned()));
            }
            command = commands.recv() => match command.as_deref() {
                Some("check") => say_of(&hold, What::Checked, None),
                Some("release") => {
                    let token = hold.token().0;
                    let released = hold.release().await;
                    say(What::Released, Some(token), None, released.err().map(|e| e.to_string()));
                    return Ok(());
                }
                _ if args.no_release => {
                    // Like a process that exits without releasing its lock.
                    std::process::exit(0);
                }
                _ => return Ok(()),
            },
        }
    }
}

/// The lines of stdin, read by a thread, so that a blocking read can't block the runtime.
fn commands() -> tokio::sync::mpsc::UnboundedReceiver<String> {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            if sender.send(line.trim().to_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

struct Counter {
    url: String,
    name: String,
    file: String,
    times: u32,
    unlocked: bool,
}

async fn count(connect: Connect, counter: Counter) -> Result<(), String> {
    let words = |error: palisade::Error| error.to_string();
    let client = connect(counter.url.clone()).await.map_err(words)?;
    let mutex = client.mutex(&counter.name);
    for _ in 0..counter.times {
        let hold = if counter.unlocked {
            None
        } else {
            Some(mutex.lock().await.map_err(words)?)
        };
        let file = Path::new(&counter.file);
        super::increment(file, Duration::from_millis(1)).map_err(|error| error.to_string())?;
        if let Some(hold) = hold {
            hold.release().await.map_err(words)?;
        }
    }
    say(What::Counted, None, None, None);
    Ok(())
}

fn parse_taker(arguments: &[String]) -> Result<(String, String, TakerArgs), String> {
    let mut plain = Vec::new();
    let mut args = TakerArgs::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--ttl" => args.ttl = Some(palisade::command::parse_duration(value()?)?),
            "--no-release" => args.no_release = true,
            "--mode" => {
                args.ask = match value()?.as_str() {
                    "exclusive" => Ask::Whole,
                    "shared" => Ask::READ,
                    "permits" => parse_permits(value()?)?,
                    other => return Err(format!("unknown mode {other:?}")),
                }
            }
            _ => plain.push(argument.clone()),
        }
    }
    match <[String; 2]>::try_from(plain) {
        Ok([url, name]) => Ok((url, name, args)),
        Err(_) => Err(
            "taker URL NAME [--ttl 5s] [--mode exclusive|shared|permits K/N] [--no-release]".into(),
        ),
    }
}

fn parse_permits(text: &str) -> Result<Ask, String> {
    let wrong = || format!("permits are K/N, not {text:?}");
    let (weight, capacity) = text.split_once('/').ok_or_else(wrong)?;
    Ok(Ask::Part {
        weight: weight.parse().map_err(|_| wrong())?,
        capacity: capacity.parse().map_err(|_| wrong())?,
    })
}

fn parse_counter(arguments: &[String]) -> Result<Counter, String> {
    let unlocked = arguments.iter().any(|argument| argument == "--unlocked");
    let plain = arguments
        .iter()
        .filter(|argument| *argument != "--unlocked");
    match plain.collect::<Vec<_>>()[..] {
        [url, name, file, times] => Ok(Counter {
            url: url.clone(),
            name: name.clone(),
            file: file.clone(),
            times: times.parse().map_err(|_| "TIMES is a whole number")?,
            unlocked,
        }),
        _ => Err("counter URL NAME FILE TIMES [--unlocked]".into()),
    }
}
