//! The one table of palisade's own engines under test, and how each is started for a run.

use std::sync::Arc;
use std::time::Duration;

use super::launch::apiserver::ApiServer;
use super::launch::gateway::{Door, Gateway};
use super::launch::{self, Running};
use super::outage::Servers;
use super::proxy::Protocol;
use crate::engine::{CutOff, EngineUnderTest, Site};

/// The engines that palisade ships.
pub const ENGINES: &[EngineUnderTest] = &[
    EngineUnderTest::new("memory", || Ok(Site::new("memory:"))),
    EngineUnderTest::new("file", file),
    served("etcd", || server("etcd").map(scans_twice_a_second)),
    served("etcd3", || server("etcd3").map(may_revoke_after_a_stop)),
    // Behind fault proxies, so that it can be cut off from its clients.
    served("etcd3-proxied", || {
        proxied("etcd3", Protocol::Grpc).map(may_revoke_after_a_stop)
    }),
    served("etcd35", || server("etcd35").map(scans_twice_a_second)),
    served("etcd35x3", || {
        server("etcd35x3").map(may_revoke_after_a_stop)
    }),
    served("consul", || server("consul").map(keeps_twice_the_ttl)),
    served("consul3", || server("consul3").map(keeps_twice_the_ttl)),
    served("consul-proxied", || {
        proxied("consul", Protocol::Http1).map(keeps_twice_the_ttl)
    }),
    served("zookeeper", || server("zookeeper").map(keeps_longer)),
    served("zookeeper3", || server("zookeeper3").map(keeps_longer)),
    served("zookeeper3-proxied", || {
        proxied("zookeeper3", Protocol::ZooKeeper).map(keeps_longer)
    }),
    served("kubernetes", kubernetes),
    served("redis", || proxied("redis", Protocol::Resp)),
    served("valkey", || server("valkey")),
    served("redis+sentinel", || server("redis-sentinel")),
    served("redis+cluster", || server("redis-cluster")),
    served("redlock", redlock),
    served("postgres", || server("postgres")),
    served("postgres+advisory", advisory),
    served("postgres-pooled", pooled),
    // Through a gateway, which is a separate process.
    gateway("http+unix-memory", || {
        through(Door::Socket, Ok(Site::new("memory:")))
    }),
    gateway("http+unix-file", || through(Door::Socket, file())),
    gateway("http-redis", || through(Door::Port, server("redis"))),
    gateway("http-postgres", || through(Door::Port, server("postgres"))),
    gateway("http-etcd", || {
        through(Door::Port, server("etcd").map(scans_twice_a_second))
    }),
];

/// An engine behind a gateway, which is started for the run and needs the command to be built.
const fn gateway(name: &'static str, start: fn() -> Result<Site, String>) -> EngineUnderTest {
    served(name, start)
}

/// The site of a gateway in front of an engine.
fn through(door: Door, engine: Result<Site, String>) -> Result<Site, String> {
    let engine = engine?;
    let gateway = Arc::new(Gateway::start(&engine.url, &[])?);
    let site = Site {
        processes: true,
        promised: true,
        late: engine.late,
        ..Site::new(gateway.url(door))
    };
    Ok(site.keeping((gateway, engine)))
}

/// An engine behind a server, which is started for the run.
const fn served(name: &'static str, start: fn() -> Result<Site, String>) -> EngineUnderTest {
    EngineUnderTest {
        installed: true,
        ..EngineUnderTest::new(name, start)
    }
}

fn file() -> Result<Site, String> {
    let dir = tempfile::Builder::new()
        .prefix("palisade-file-")
        .tempdir()
        .map_err(|error| format!("no temporary directory: {error}"))?;
    let site = Site {
        processes: true,
        // The kernel reports a death at once; the rest allows for scheduling on a busy machine.
        notices_death: Some(Duration::from_millis(50)),
        ..Site::new(format!("file:{}", dir.path().display()))
    };
    Ok(site.keeping(dir))
}

fn start(name: &str) -> Result<Running, String> {
    launch::start(name).map_err(|error| error.to_string())
}

fn server(name: &str) -> Result<Site, String> {
    Ok(site(Servers::new(start(name)?)))
}

/// The same behind a fault proxy for each node.
fn proxied(name: &str, protocol: Protocol) -> Result<Site, String> {
    Ok(site(Servers::proxied(start(name)?, protocol)?))
}

/// A site of servers, which live as long as it does.
fn site(servers: Servers) -> Site {
    Site {
        processes: true,
        outages: Some(Arc::new(servers.clone())),
        ..Site::new(servers.url())
    }
}

/// Consul keeps a session for up to twice its ttl.
fn keeps_twice_the_ttl(site: Site) -> Site {
    Site { lasts: 2, ..site }
}

/// A ZooKeeper session lasts half as long again as the ttl, and ends at a tick of 500 ms.
fn keeps_longer(site: Site) -> Site {
    Site {
        lasts: 2,
        late: Duration::from_millis(1000),
        ..site
    }
}

/// etcd scans for expired leases twice a second.
fn scans_twice_a_second(site: Site) -> Site {
    Site {
        late: Duration::from_millis(500),
        ..site
    }
}

/// etcd of several members: a leader that was stopped and continues may revoke leases that its
/// successor keeps alive (etcd #15247; seen with 3.4.23 and 3.5.16).
fn may_revoke_after_a_stop(site: Site) -> Site {
    Site {
        takes_away: true,
        ..scans_twice_a_second(site)
    }
}

/// The cluster of the kubeconfig that [`KUBECONFIG`] names, else a fake API server.
fn kubernetes() -> Result<Site, String> {
    if let Some(path) = std::env::var_os(KUBECONFIG).filter(|path| !path.is_empty()) {
        let path = path.to_string_lossy().into_owned();
        return Ok(Site {
            processes: true,
            watches_overdue: true,
            ..Site::new(format!("kubernetes://?kubeconfig={path}"))
        });
    }
    let server = Arc::new(ApiServer::start()?);
    Ok(Site {
        processes: true,
        watches_overdue: true,
        outages: Some(server.clone()),
        ..Site::new(server.url())
    })
}

/// Names a kubeconfig of a real cluster; its context's namespace is used.
pub const KUBECONFIG: &str = "PALISADE_TEST_KUBECONFIG";

/// Five servers, without the restart guard and with a timeout for a busy machine.
fn redlock() -> Result<Site, String> {
    let site = proxied("redis5", Protocol::Resp)?;
    Ok(Site {
        url: format!("{}?restart_guard=off&node_timeout=500ms", site.url),
        ..site
    })
}

/// PostgreSQL for session locks.
fn advisory() -> Result<Site, String> {
    let site = server("postgres")?;
    Ok(Site {
        url: site.url.replacen("postgres:", "postgres+advisory:", 1),
        // The kernel closes the connections of a dead process, and the server releases its locks.
        notices_death: Some(Duration::from_millis(300)),
        ..site
    })
}

/// PostgreSQL behind a pooler in transaction mode; waiters listen on a direct connection.
fn pooled() -> Result<Site, String> {
    let running = start("pgbouncer")?;
    let server = running.nodes()[1].address();
    let listen = format!("postgres%3A%2F%2Fpalisade%40{server}%2Fpostgres");
    let site = Site {
        processes: true,
        ..Site::new(format!("{}?listen_url={listen}", running.url()))
    };
    Ok(site.keeping(running))
}

/// A gateway for a single trial, which may cut it off: the gateway itself, not the engine behind
/// it.
///
/// # Errors
/// A message if it does not start.
pub fn severable_gateway(door: Door) -> Result<Site, String> {
    let gateway = Arc::new(Gateway::start("memory:", &[])?);
    let site = Site {
        processes: true,
        promised: true,
        cut_off: Some(gateway.clone() as Arc<dyn CutOff>),
        ..Site::new(gateway.url(door))
    };
    Ok(site.keeping(gateway))
}

/// A server for a single trial, which may cut it off.
///
/// # Errors
/// A message if it is not available or does not start.
pub fn severable(name: &str) -> Result<Site, String> {
    let running = Arc::new(start(name)?);
    let site = Site {
        processes: true,
        cut_off: Some(running.clone() as Arc<dyn CutOff>),
        ..Site::new(running.url())
    };
    Ok(site.keeping(running))
}
