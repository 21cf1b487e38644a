//! The conformance suite over palisade's own engines. See `docs/testing.md`.

use std::process::ExitCode;

fn main() -> ExitCode {
    palisade_testkit::harness::main(palisade_testkit::lab::engines::ENGINES)
}
