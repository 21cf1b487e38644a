//! Shared by the tests.

use std::time::Duration;

use palisade::report::{LineReport, Scope};
use palisade::{Client, Name};
use palisade_testkit::lab::launch::apiserver::ApiServer;
pub(crate) use palisade_testkit::lab::trial::{cycle, soon, until};
use serde_json::Value;

/// The test's own server.
pub(crate) fn server() -> ApiServer {
    ApiServer::start().unwrap()
}

pub(crate) async fn client(server: &ApiServer) -> Client {
    palisade::connect(&server.url()).await.unwrap()
}

/// A client of the names that other tools use.
pub(crate) async fn beside_others(server: &ApiServer) -> Client {
    palisade::connect(&format!("{}&namespace=", server.url()))
        .await
        .unwrap()
}

/// The Lease of one of our locks.
pub(crate) fn lease(server: &ApiServer, name: &str) -> Value {
    server.lease(&format!("palisade.{name}")).expect("a Lease")
}

pub(crate) fn holder(lease: &Value) -> &str {
    lease["spec"]["holderIdentity"].as_str().unwrap_or("")
}

/// The line as a survey shows it.
pub(crate) async fn shown(client: &Client, name: &str) -> Option<LineReport> {
    let scope = Scope::Line(Name::new(name).unwrap());
    client.survey(scope).await.unwrap().pop()
}

pub(crate) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
