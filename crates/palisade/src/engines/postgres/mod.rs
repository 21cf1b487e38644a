//! `postgres://` — lines in a table of a PostgreSQL database, one statement per verb.
//!
//! Everything that decides a line is in its one row, and functions in the database decide it
//! (`schema.sql`); this module speaks with them. Times are the server's. Invariant: a
//! request is asked again only when the server said that it was rolled back.
//!
//! `server` connects, `pooler` finds out what stands in between, `session` is one connection,
//! `desk` asks on it, `queue` keeps a crowd of waiters out of the server's line, `mail` is what the
//! server pushes.

pub mod advisory;
mod alarm;
#[cfg(feature = "baseline")]
mod baseline;
mod check;
mod desk;
mod engine;
mod fault;
mod mail;
mod offer;
mod pooler;
mod queue;
mod refused;
mod renew;
mod schema;
mod server;
mod session;
mod shedlock;
mod survey;
mod verbs;
mod wire;

use std::sync::Arc;

pub(crate) use offer::FACTORY;
pub use schema::Schema;

use self::desk::{Desk, Plan};
use self::pooler::Between;
use self::server::Server;
use crate::core::dyn_engine::SharedEngine;
use crate::core::error::{Error, Kind, Result};
use crate::core::url::{Settings, Url};

/// Opens the lease table; nothing is asked of the server before the first verb.
///
/// # Errors
/// [`Kind::Config`] for a URL or option that can't be used.
pub fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let layout = url.take("layout");
    let plan = plan(&mut url, settings)?;
    url.finish(offer::OPTIONS)?;
    let shown = plan.server.shown(&url.scheme);
    let desk = Arc::new(Desk::new(plan, settings));
    match layout.as_deref() {
        None | Some("palisade") => Ok(Arc::new(PostgresEngine { desk, shown })),
        Some("shedlock") => Ok(Arc::new(shedlock::ShedlockEngine::new(desk, shown))),
        Some(_) => Err(Error::new(
            Kind::Config,
            "connect",
            "option layout must be palisade or shedlock",
        )),
    }
}

fn plan(url: &mut Url, settings: &Settings) -> Result<Plan> {
    let schema = match url.take("schema") {
        None => Schema::default(),
        Some(name) => Schema::new(&name)?,
    };
    let listen = url.take("listen_url").map(|text| {
        listening(&text, settings).map_err(|error| {
            let message = format!("option listen_url: {}", error.message());
            Error::new(Kind::Config, "connect", message)
        })
    });
    Ok(Plan {
        between: Between::take(url)?,
        listen: listen.transpose()?,
        schema,
        server: Server::take(url, settings)?,
    })
}

/// The server to listen on, which a pooler hides.
fn listening(text: &str, settings: &Settings) -> Result<Server> {
    let mut url = Url::parse(text)?;
    if !FACTORY.info.schemes.contains(&url.scheme.as_str()) {
        let message = "it is a postgres:// URL of the server itself, %-encoded";
        return Err(Error::new(Kind::Config, "connect", message));
    }
    let server = Server::take(&mut url, settings)?;
    url.finish(&[])?;
    Ok(server)
}

/// A namespace of one database.
struct PostgresEngine {
    desk: Arc<Desk>,
    shown: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_listen_url_is_named_and_not_repeated() {
        for bad in [
            "secret",
            "redis%3A%2F%2Fsecret",
            "postgres%3A%2F%2F%3Asecret%40",
        ] {
            let mut url = Url::parse(&format!("postgres://h/d?listen_url={bad}")).unwrap();
            let settings = url.take_settings().unwrap();
            let error = plan(&mut url, &settings).err().unwrap();
            assert_eq!(error.kind(), Kind::Config);
            let said = error.message();
            assert!(said.starts_with("option listen_url: "), "{said}");
            assert!(!said.contains("secret"), "{said}");
        }
    }
}
