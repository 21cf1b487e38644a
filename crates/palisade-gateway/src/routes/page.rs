//! The routes without a token: the dashboard's files and the description of the API.
//!
//! The files are part of the binary and contain no data of this gateway: the page requests its data
//! with a token. Its content security policy allows only resources of this origin, no inline code,
//! and no text that becomes markup, so that any name of a lock is safe.

use hyper::StatusCode;
use hyper::header::HeaderValue;

use crate::answer::{Answer, made};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const IMAGE: &str = "image/svg+xml";
const JSON: &str = "application/json";

/// The path, type and text of each file.
const FILES: &[(&str, &str, &str)] = &[
    ("/", HTML, include_str!("../dashboard/index.html")),
    ("/openapi.json", JSON, crate::openapi::DOCUMENT),
    (
        "/dashboard/style.css",
        STYLE,
        include_str!("../dashboard/style.css"),
    ),
    (
        "/dashboard/icon.svg",
        IMAGE,
        include_str!("../dashboard/icon.svg"),
    ),
    (
        "/dashboard/app.js",
        SCRIPT,
        include_str!("../dashboard/app.js"),
    ),
    (
        "/dashboard/deadlocks.js",
        SCRIPT,
        include_str!("../dashboard/deadlocks.js"),
    ),
    (
        "/dashboard/dom.js",
        SCRIPT,
        include_str!("../dashboard/dom.js"),
    ),
    (
        "/dashboard/engine.js",
        SCRIPT,
        include_str!("../dashboard/engine.js"),
    ),
    (
        "/dashboard/evict.js",
        SCRIPT,
        include_str!("../dashboard/evict.js"),
    ),
    (
        "/dashboard/feed.js",
        SCRIPT,
        include_str!("../dashboard/feed.js"),
    ),
    (
        "/dashboard/format.js",
        SCRIPT,
        include_str!("../dashboard/format.js"),
    ),
    (
        "/dashboard/gateway.js",
        SCRIPT,
        include_str!("../dashboard/gateway.js"),
    ),
    (
        "/dashboard/graph.js",
        SCRIPT,
        include_str!("../dashboard/graph.js"),
    ),
    (
        "/dashboard/history.js",
        SCRIPT,
        include_str!("../dashboard/history.js"),
    ),
    (
        "/dashboard/list.js",
        SCRIPT,
        include_str!("../dashboard/list.js"),
    ),
    (
        "/dashboard/lock.js",
        SCRIPT,
        include_str!("../dashboard/lock.js"),
    ),
    (
        "/dashboard/locks.js",
        SCRIPT,
        include_str!("../dashboard/locks.js"),
    ),
    (
        "/dashboard/metrics.js",
        SCRIPT,
        include_str!("../dashboard/metrics.js"),
    ),
    (
        "/dashboard/plot.js",
        SCRIPT,
        include_str!("../dashboard/plot.js"),
    ),
    (
        "/dashboard/principal.js",
        SCRIPT,
        include_str!("../dashboard/principal.js"),
    ),
    (
        "/dashboard/waits.js",
        SCRIPT,
        include_str!("../dashboard/waits.js"),
    ),
];

/// The file at this path.
pub(super) fn file(path: &str) -> Option<Answer> {
    let (_, kind, text) = FILES.iter().find(|(known, ..)| *known == path)?;
    let mut response = made(StatusCode::OK, kind, text.as_bytes());
    let policy = HeaderValue::from_static(POLICY);
    response
        .headers_mut()
        .insert("content-security-policy", policy);
    Some(Answer::Other(response))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_of_the_folder_is_served_and_asks_for_nothing_elsewhere() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dashboard");
        let found: BTreeSet<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let name = |path: &str| match path {
            "/" => "index.html".to_owned(),
            path => path.rsplit('/').next().unwrap().to_owned(),
        };
        let files = || FILES.iter().filter(|(_, kind, _)| *kind != JSON);
        let served: BTreeSet<String> = files().map(|(path, ..)| name(path)).collect();
        assert_eq!(served, found);
        for (path, _, text) in files() {
            // An XML namespace is a name, not a URL to fetch.
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for elsewhere in [
                "http://",
                "https://",
                "\"//",
                "innerHTML",
                "eval(",
                " style=\"",
            ] {
                assert!(!text.contains(elsewhere), "{path} has {elsewhere}");
            }
            for module in text
                .lines()
                .filter_map(|line| line.split("from \"./").nth(1))
            {
                let module = module.trim_end_matches("\";");
                assert!(found.contains(module), "{path} imports {module}");
            }
        }
    }

    #[test]
    fn the_page_has_a_policy_of_its_own() {
        let response = file("/").unwrap().into_response();
        let policy = &response.headers()["content-security-policy"];
        assert!(policy.to_str().unwrap().contains("script-src 'self';"));
        assert!(!policy.to_str().unwrap().contains("unsafe"));
        assert_eq!(response.headers()["x-content-type-options"], "nosniff");
        assert!(file("/dashboard/").is_none());
        assert!(file("/dashboard/../lib.rs").is_none());
    }
}
