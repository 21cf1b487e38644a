//! Work queues on every store that has them: one list of behaviours × stores, real consumers that
//! are killed and stopped, and what is specific to one store. One server of each kind serves all
//! trials. `PALISADE_TEST_ENGINES` (a comma-separated list) selects stores, `PALISADE_TEST_FULL=1`
//! runs 100,000 messages.

#![allow(clippy::unwrap_used)]

mod behaviour;
mod command;
mod file;
mod keys;
mod kills;
mod leases;
mod operate;
mod postgres;
mod redis;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use libtest_mimic::{Arguments, Failed, Trial};
use palisade::Client;
use palisade::queue::Queue;
use palisade_testkit::lab::launch::{self, Running};
use parking_lot::Mutex;

/// The stores.
const STORES: &[&str] = &["file", "postgres", "redis"];

/// Longer than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// Only a fault passes it: many keys on a busy machine take half a minute.
const SOON: Duration = Duration::from_secs(180);

/// A case: its name, and its code.
type Case = (&'static str, fn(Fixture) -> LocalBoxFuture<'static, ()>);

/// Builds a list of cases from functions.
macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        pub(crate) const CASES: &[crate::Case] = &[
            $((concat!(module_path!(), "::", stringify!($case)), |fx| Box::pin($case(fx)))),*
        ];
    };
}
pub(crate) use cases;

/// The store of a case: a directory, or a namespace of a shared server.
pub(crate) struct Fixture {
    pub(crate) store: &'static str,
    pub(crate) url: String,
    /// Removed at the end.
    pub(crate) folder: Arc<tempfile::TempDir>,
}

impl Fixture {
    /// `None` if the server is not available here.
    fn new(store: &'static str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let url = match store {
            // A busy machine is slow, which is no error here.
            "file" => format!("file:{}/store?timeout=20s", folder.path().display()),
            server => {
                let server = running(server)?;
                let mark = if server.url().contains('?') { '&' } else { '?' };
                format!(
                    "{}{mark}timeout=20s&namespace=q{:016x}",
                    server.url(),
                    rand::random::<u64>()
                )
            }
        };
        Some(Self {
            store,
            url,
            folder: Arc::new(folder),
        })
    }

    pub(crate) async fn client(&self) -> Client {
        palisade::connect(&*self.url).await.unwrap()
    }

    /// The queue of the case, on its own connection, with leases of two seconds.
    pub(crate) async fn queue(&self) -> Queue {
        let ttl = Duration::from_secs(2);
        self.client().await.queue("work").ttl(ttl)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// The servers of this process.
fn running(name: &'static str) -> Option<&'static Running> {
    type Server = Arc<OnceLock<Option<Running>>>;
    static SERVERS: LazyLock<Mutex<HashMap<&str, &Server>>> = LazyLock::new(Mutex::default);
    let server: &'static Server = {
        let mut servers = SERVERS.lock();
        servers
            .entry(name)
            .or_insert_with(|| Box::leak(Box::default()))
    };
    server.get_or_init(|| launch::need(name)).as_ref()
}

pub(crate) fn is_full() -> bool {
    std::env::var_os("PALISADE_TEST_FULL").is_some()
}

/// Waits for `what`, however busy the machine is.
pub(crate) async fn soon<T>(name: &str, what: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(SOON, what).await;
    done.unwrap_or_else(|_| panic!("{name} did not happen within {SOON:?}"))
}

/// Polls until `test` returns `true`.
pub(crate) async fn until(name: &str, mut test: impl AsyncFnMut() -> bool) {
    soon(name, async {
        while !test().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

fn trial(
    store: &'static str,
    run: fn(Fixture) -> LocalBoxFuture<'static, ()>,
) -> Result<(), Failed> {
    let Some(fixture) = Fixture::new(store) else {
        return Ok(());
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(run(fixture));
    Ok(())
}

fn main() -> ExitCode {
    let chosen = std::env::var("PALISADE_TEST_ENGINES").ok();
    let is_chosen = |store: &&&str| {
        let mut names = chosen
            .as_deref()
            .into_iter()
            .flat_map(|names| names.split(','));
        chosen.is_none() || names.any(|name| name == **store)
    };
    let everywhere = [
        behaviour::CASES,
        keys::CASES,
        leases::CASES,
        operate::CASES,
        kills::CASES,
        command::CASES,
    ];
    let mut trials = Vec::new();
    for &store in STORES.iter().filter(is_chosen) {
        let own = match store {
            "file" => file::CASES,
            "postgres" => postgres::CASES,
            "redis" => redis::CASES,
            _ => &[],
        };
        for &(name, run) in everywhere.into_iter().flatten().chain(own) {
            let name = name.trim_start_matches("queue::");
            trials.push(Trial::test(format!("{store}::{name}"), move || {
                trial(store, run)
            }));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
