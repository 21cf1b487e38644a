//! The testkit's command: `taker` and `counter` run as second processes of tests, `table` prints
//! the results of a conformance run, `up` starts a real engine.

use std::process::ExitCode;

use palisade_testkit::lab::engines::ENGINES;
use palisade_testkit::lab::{consumer, faults, fencing, launch};
use palisade_testkit::{conformance, report, taker};

const USAGE: &str = "usage:
  palisade-testkit taker URL NAME [--ttl 5s] [--mode exclusive|shared|permits K/N] [--no-release]
  palisade-testkit counter URL NAME FILE TIMES [--unlocked]
  palisade-testkit table REPORT [--require ENGINE,ENGINE]
  palisade-testkit up [ENGINE [SETTING…]]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(code) = taker::process::main(&arguments, ENGINES) {
        return code;
    }
    if let Some(code) = faults::worker::main(&arguments, ENGINES)
        .or_else(|| faults::command::main(&arguments, ENGINES))
        .or_else(|| faults::experiment::main(&arguments, ENGINES))
        .or_else(|| fencing::writer::main(&arguments))
        .or_else(|| consumer::main(&arguments))
    {
        return code;
    }
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["up"] => launch::up::list(),
        ["up", engine, ref settings @ ..] => launch::up::up(engine, settings),
        ["table", path] => table(path, ""),
        ["table", path, "--require", engines] => table(path, engines),
        _ => {
            eprintln!(
                "{USAGE}\n{}\n{}",
                faults::command::USAGE,
                faults::experiment::USAGE
            );
            ExitCode::from(2)
        }
    }
}

fn table(path: &str, required: &str) -> ExitCode {
    let rows = std::fs::read_to_string(path)
        .map_err(|error| error.to_string())
        .and_then(|text| report::read(&text));
    let rows = match rows {
        Ok(rows) => rows,
        Err(why) => {
            eprintln!("{path}: {why}");
            return ExitCode::from(2);
        }
    };
    let required = required.split(',').filter(|engine| !engine.is_empty());
    let required: Vec<String> = required.map(str::to_owned).collect();
    let table = report::table(&rows, &required, &conformance::all());
    print!("{}", table.text);
    ExitCode::from(u8::from(table.failed + table.missing > 0))
}
