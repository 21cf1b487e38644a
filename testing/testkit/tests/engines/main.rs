//! Engines against the model of lines: random operations on a few names. After every step the
//! survey must equal the model, and sequences must only have risen.

#![allow(clippy::unwrap_used)]

mod reference;
mod under_test;

use proptest::test_runner::Config;
use proptest_state_machine::prop_state_machine;
use under_test::{File, Memory};

/// `PROPTEST_CASES` raises the number for a longer search.
fn config(cases: u32) -> Config {
    let default = Config::default();
    Config {
        cases: if std::env::var_os("PROPTEST_CASES").is_some() {
            default.cases
        } else {
            cases
        },
        failure_persistence: None,
        ..default
    }
}

prop_state_machine! {
    #![proptest_config(config(150))]

    #[test]
    fn memory_is_the_model(sequential 1..60 => Memory);
}

prop_state_machine! {
    #![proptest_config(config(60))]

    #[test]
    fn file_is_the_model(sequential 1..60 => File);
}
