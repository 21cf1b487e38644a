//! PostgreSQL: the lease table, alone and behind a pooler.

use std::sync::Arc;
use std::time::Duration;

use crate::launch::{self, Running};
use crate::subject::{Harm, Hurt, Site};

fn start(name: &str) -> Result<Running, String> {
    launch::start(name).map_err(|error| error.to_string())
}

/// One server.
pub(crate) fn table() -> Result<Site, String> {
    let running = Arc::new(start("postgres")?);
    Ok(Site {
        processes: true,
        hurt: Some(Arc::new(Servers(Arc::clone(&running)))),
        ..Site::new(running.url())
    }
    .keeping(running))
}

/// One server, for session locks.
pub(crate) fn advisory() -> Result<Site, String> {
    let site = table()?;
    Ok(Site {
        url: site.url.replacen("postgres:", "postgres+advisory:", 1),
        // The kernel closes the connections of a process that dies, and the server lets go.
        notices_death: Some(Duration::from_millis(300)),
        ..site
    })
}

/// A server behind a pooler in transaction mode; whoever waits listens at the server itself.
pub(crate) fn pooled() -> Result<Site, String> {
    let running = start("pgbouncer")?;
    let server = running.nodes()[1].address();
    let listen = format!("postgres%3A%2F%2Fpalisade%40{server}%2Fpostgres");
    Ok(Site {
        processes: true,
        ..Site::new(format!("{}?listen_url={listen}", running.url()))
    }
    .keeping(running))
}

/// Stops and kills the servers of a site.
struct Servers(Arc<Running>);

impl Hurt for Servers {
    fn can(&self, harm: Harm) -> bool {
        matches!(harm, Harm::Stop | Harm::Kill)
    }

    fn begin(&self, harm: Harm) -> Result<(), String> {
        self.0.nodes().iter().try_for_each(|node| match harm {
            Harm::Stop => node.stop(),
            _ => node.kill(),
        })
    }

    fn end(&self, harm: Harm) -> Result<(), String> {
        self.0.nodes().iter().try_for_each(|node| match harm {
            Harm::Stop => node.cont(),
            _ => node.restart(),
        })?;
        self.0.ready()
    }
}
