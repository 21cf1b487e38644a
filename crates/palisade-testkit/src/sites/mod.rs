//! Sites that need a server: how each engine behind a network is started for a run.

mod postgres;

pub(crate) use postgres::{advisory, pooled, table};
