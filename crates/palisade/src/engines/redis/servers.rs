//! `Servers`: which server a line is on. There is a single server, the master that Sentinel names,
//! or the masters of a Cluster; the verbs need not know which.

use std::time::Duration;

use super::cluster::Cluster;
use super::connection::{Connection, Server};
use super::keys::LineKeys;
use super::sentinel::Sentinel;
use crate::core::error::Result;
use crate::engines::kit::{Host, Link, PerRuntime};

pub(in crate::engines) enum Servers {
    One(One),
    Sentinel(Sentinel),
    Cluster(Cluster),
}

/// A single server.
pub(in crate::engines) struct One {
    pub(in crate::engines) server: Server,
    pub(in crate::engines) links: PerRuntime<Connection>,
}

/// This runtime's connection. One that is known to have ended is replaced first: the outcome of a
/// request on it would be unknown.
pub(super) async fn live(links: &PerRuntime<Connection>) -> Result<Link<Connection>> {
    let link = links.get().await?;
    if !link.connection.is_over() {
        return Ok(link);
    }
    links.broken(&link).await;
    links.get().await
}

impl Servers {
    /// A connection to the server that owns the line, or to any server.
    pub(in crate::engines) async fn link(
        &self,
        line: Option<&LineKeys>,
    ) -> Result<Link<Connection>> {
        match self {
            Self::One(one) => live(&one.links).await,
            Self::Sentinel(sentinel) => live(&sentinel.links).await,
            Self::Cluster(cluster) => cluster.link(line).await,
        }
    }

    /// A connection to each server that has lines.
    pub(super) async fn all(&self) -> Result<Vec<Link<Connection>>> {
        match self {
            Self::Cluster(cluster) => cluster.all().await,
            _ => Ok(vec![self.link(None).await?]),
        }
    }

    /// The servers that have lines.
    pub(super) async fn masters(&self) -> Result<Vec<Server>> {
        match self {
            Self::One(one) => Ok(vec![one.server.clone()]),
            Self::Sentinel(sentinel) => Ok(vec![sentinel.master().await?]),
            Self::Cluster(cluster) => cluster.masters().await,
        }
    }

    /// Drops a connection.
    pub(in crate::engines) async fn broken(&self, link: &Link<Connection>) {
        match self {
            Self::One(one) => one.links.broken(link).await,
            Self::Sentinel(sentinel) => sentinel.links.broken(link).await,
            Self::Cluster(cluster) => cluster.broken(link).await,
        }
    }

    /// Whether replies from this connection's server count. A deposed master may not yet know that
    /// it was replaced.
    pub(super) fn counts(&self, link: &Link<Connection>) -> bool {
        match self {
            Self::Sentinel(sentinel) => sentinel.is_master(link.connection.host()),
            Self::One(_) | Self::Cluster(_) => true,
        }
    }

    pub(super) fn cluster(&self) -> Option<&Cluster> {
        match self {
            Self::Cluster(cluster) => Some(cluster),
            Self::One(_) | Self::Sentinel(_) => None,
        }
    }

    pub(super) fn sentinel(&self) -> Option<&Sentinel> {
        match self {
            Self::Sentinel(sentinel) => Some(sentinel),
            Self::One(_) | Self::Cluster(_) => None,
        }
    }

    /// The hosts of the URL, and whether connections to them are encrypted.
    pub(super) fn named(&self) -> (Vec<Host>, bool) {
        match self {
            Self::One(one) => (vec![one.server.host.clone()], one.server.tls.is_some()),
            Self::Sentinel(sentinel) => sentinel.named(),
            Self::Cluster(cluster) => cluster.named(),
        }
    }

    pub(super) fn connect_timeout(&self) -> Duration {
        match self {
            Self::One(one) => one.links.connect_timeout(),
            Self::Sentinel(sentinel) => sentinel.links.connect_timeout(),
            Self::Cluster(cluster) => cluster.connect_timeout(),
        }
    }

    pub(in crate::engines) fn close(&self) {
        match self {
            Self::One(one) => one.links.close(),
            Self::Sentinel(sentinel) => sentinel.close(),
            Self::Cluster(cluster) => cluster.close(),
        }
    }
}
