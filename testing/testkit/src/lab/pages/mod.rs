//! Pages whose examples are run: their blocks, and real servers for the URLs that they show.
//!
//! A page names servers as a reader has them (`redis://db1`). [`Servers`] maps such a URL to a
//! server of the [`launch`] table: one of each kind, for as long as the `Servers` live.

mod blocks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

pub use blocks::{Block, blocks, pages};

use super::launch::apiserver::ApiServer;
use super::launch::{self, Running};

/// The schemes in pages, and the engines that serve them.
const BEHIND: &[(&str, &str)] = &[
    ("consul", "consul"),
    ("etcd", "etcd"),
    ("kubernetes", KUBERNETES),
    ("postgres", "postgres"),
    ("postgres+advisory", "postgres"),
    ("redis", "redis"),
    ("redis+cluster", "redis-cluster"),
    ("redis+sentinel", "redis-sentinel"),
    ("redlock", "redis5"),
    ("zookeeper", "zookeeper"),
];

const KUBERNETES: &str = "kubernetes";

/// The characters that end a URL in a script or a program.
const ENDS: &[char] = &[' ', '\n', '\'', '"', '`', ')', ';', '|', '\\'];

/// The root of the project.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All blocks of all pages.
///
/// # Panics
/// If a page can't be read.
pub fn all_blocks() -> Vec<Block> {
    let root = root();
    let of = |page: PathBuf| {
        let text = std::fs::read_to_string(root.join(&page));
        let text = text.unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        blocks(&page.display().to_string(), &text)
    };
    pages(&root).into_iter().flat_map(of).collect()
}

enum Server {
    Engine(Running),
    Cluster(ApiServer),
}

impl Server {
    fn url(&self) -> String {
        match self {
            Self::Engine(running) => running.url().to_owned(),
            Self::Cluster(server) => server.url(),
        }
    }
}

/// Servers that were requested, one of each kind.
#[derive(Default)]
pub struct Servers {
    started: Mutex<BTreeMap<&'static str, Arc<OnceLock<Option<Server>>>>>,
}

impl Servers {
    /// Replaces every URL of an engine in the text by that of a started server; `None` if one is
    /// not available here, which is reported as by [`launch::need`].
    ///
    /// # Panics
    /// If a server does not start.
    pub fn mapped(&self, text: &str) -> Option<String> {
        let (mut mapped, mut rest) = (String::new(), text);
        while let Some(at) = rest.find("://") {
            let begin = rest[..at].rfind(|c: char| !c.is_ascii_lowercase() && c != '+');
            let begin = begin.map_or(0, |before| before + 1);
            let end = rest[at..].find(ENDS).map_or(rest.len(), |end| at + end);
            mapped += &rest[..begin];
            match BEHIND
                .iter()
                .find(|(scheme, _)| *scheme == &rest[begin..at])
            {
                Some((_, behind)) => mapped += &joined(&rest[begin..end], &self.url(behind)?),
                None => mapped += &rest[begin..end],
            }
            rest = &rest[end..];
        }
        Some(mapped + rest)
    }

    /// The server of this name in the table of [`launch`], for more than its URL.
    pub fn with<T>(&self, name: &'static str, use_it: impl FnOnce(&Running) -> T) -> Option<T> {
        match self.server(name).get()?.as_ref()? {
            Server::Engine(running) => Some(use_it(running)),
            Server::Cluster(_) => None,
        }
    }

    fn url(&self, name: &'static str) -> Option<String> {
        self.server(name).get()?.as_ref().map(Server::url)
    }

    fn server(&self, name: &'static str) -> Arc<OnceLock<Option<Server>>> {
        let cell = self.started.lock().entry(name).or_default().clone();
        cell.get_or_init(|| {
            if name == KUBERNETES {
                let server = ApiServer::start();
                return Some(Server::Cluster(
                    server.unwrap_or_else(|why| panic!("{why}")),
                ));
            }
            launch::need(name).map(Server::Engine)
        });
        cell
    }
}

/// The URL of a server, with the scheme and the options that a page shows. A Redis URL keeps the
/// page's database; any other path (a database of PostgreSQL, a master) is the server's.
fn joined(shown: &str, server: &str) -> String {
    let (scheme, asked) = shown.split_once("://").unwrap_or((shown, ""));
    let (place, options) = asked.split_once('?').unwrap_or((asked, ""));
    let (_, server) = server.split_once("://").unwrap_or(("", server));
    let (server, own) = server.split_once('?').unwrap_or((server, ""));
    let path = place.find('/').filter(|_| scheme == "redis");
    // Redlock servers that have just started don't vote otherwise.
    let young = if scheme == "redlock" {
        "restart_guard=off"
    } else {
        ""
    };
    let options: Vec<&str> = [options, own, young]
        .into_iter()
        .filter(|some| !some.is_empty())
        .collect();
    let sign = if options.is_empty() { "" } else { "?" };
    format!(
        "{scheme}://{server}{}{sign}{}",
        path.map_or("", |at| &place[at..]),
        options.join("&")
    )
}

/// For programs in pages: the URL of a started server in place of the one that they show, for the
/// rest of this process. `file:` is a separate directory.
///
/// # Panics
/// If there is no such server here.
pub fn at(url: &str) -> &'static str {
    static SERVERS: OnceLock<Servers> = OnceLock::new();
    if url.starts_with("file:") {
        static FOLDER: OnceLock<launch::Folder> = OnceLock::new();
        let folder = FOLDER
            .get_or_init(|| launch::Folder::new("page").unwrap_or_else(|why| panic!("{why}")));
        return format!("file:{}/locks", folder.path().display()).leak();
    }
    let mapped = SERVERS.get_or_init(Servers::default).mapped(url);
    mapped
        .unwrap_or_else(|| panic!("no server for {url} here"))
        .leak()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_block_has_its_notes_and_its_reason() {
        let page = "# A\n<!-- setup: a\nb -->\n```sh no-run: needs x\ntrue\n```\nText <!-- c -->\n\n```rust,no_run\n```\n";
        let found = blocks("a.md", page);
        assert_eq!((found[0].line, found[0].note("setup")), (4, Some("a\nb")));
        assert_eq!(
            (found[0].not_run(), found[0].text.as_str()),
            (Some("needs x"), "true\n")
        );
        assert_eq!(
            (found[1].language.as_str(), found[1].info.as_str()),
            ("rust", "no_run")
        );
        assert_eq!(
            (found[1].place().as_str(), found[1].notes.len()),
            ("a.md:9", 0)
        );
    }

    #[test]
    fn a_url_keeps_its_scheme_and_options() {
        let server = "postgres://palisade@127.0.0.1:5/postgres";
        let shown = "postgres+advisory://app@db/shop?ttl=5s";
        let joined_here = "postgres+advisory://palisade@127.0.0.1:5/postgres?ttl=5s";
        assert_eq!(joined(shown, server), joined_here);
        assert_eq!(joined("redis://db1/2", "redis://h:1"), "redis://h:1/2");
        assert_eq!(
            joined("redlock://a,b", "redlock://h:1,h:2"),
            "redlock://h:1,h:2?restart_guard=off"
        );
        let none = Servers::default()
            .mapped("see https://example.com, file:x and 'y'")
            .unwrap();
        assert_eq!(none, "see https://example.com, file:x and 'y'");
    }
}
