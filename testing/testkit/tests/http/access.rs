//! Access control: what is answered to clients without access, and that no secret is logged.

use palisade::ErrorKind;
use palisade_testkit::lab::launch::gateway::Door;
use palisade_testkit::lab::trial::{cycle, every_nasty_name, fails, says_no_secret, soon};

use crate::{House, with};

/// The SHA-256 of the token of the principal below.
const SHA256: &str = "ecfeb2b6eb403840c2f97361b634f51ed581a5b17c03ba20b8b0484266b9e7df";

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_logged_has_a_secret() {
    let house = House::new();
    let gateway = house.gateway(&[]);
    let url = gateway.url(Door::Port);
    let token_file = url.split_once("token_file=").unwrap().1;
    let token = std::fs::read_to_string(token_file).unwrap();
    let wrong = house.folder.path().join("wrong");
    std::fs::write(&wrong, "hunter-2-hunter-2").unwrap();
    let refused = url.replace(token_file, wrong.to_str().unwrap());
    says_no_secret(&url, &refused, &[token.trim(), "hunter-2"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_needed_and_its_lack_is_explained() {
    let house = House::new();
    let gateway = house.gateway(&[]);
    let without = gateway.url(Door::Port);
    let without = without.split_once('?').unwrap().0;
    let refused = palisade::connect(without).await;
    let said = fails(refused, ErrorKind::Denied).to_string();
    assert!(said.contains("PALISADE_GATEWAY_TOKEN"), "{said}");
    // The socket belongs to this user.
    let client = palisade::connect(&gateway.url(Door::Socket)).await.unwrap();
    cycle(&client.mutex("x")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_was_replaced_is_read_again() {
    let house = House::new();
    let gateway = house.gateway(&[]);
    let client = palisade::connect(&gateway.url(Door::Port)).await.unwrap();
    cycle(&client.mutex("x")).await;
    // The gateway creates a new token at each start.
    tokio::task::block_in_place(|| gateway.node().restart()).unwrap();
    cycle(&client.mutex("x")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_name_comes_through() {
    let house = House::new();
    let gateway = house.gateway(&[]);
    let client = palisade::connect(&gateway.url(Door::Socket)).await.unwrap();
    every_nasty_name(&client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_principal_has_its_prefix_and_no_more() {
    let house = House::new();
    let token = house.folder.path().join("token");
    let access = house.folder.path().join("access");
    let secret = "5ecret".repeat(11);
    let rules = format!(
        "[[principal]]\nname = \"billing\"\ntoken_sha256 = \"{SHA256}\"\nuse = [\"billing/\"]\n\
         see = []\noperate = []\n"
    );
    std::fs::write(&token, secret).unwrap();
    std::fs::write(&access, rules).unwrap();
    let gateway = house.gateway(&["--access", access.to_str().unwrap()]);
    let url = gateway.url(Door::Socket);
    fails(palisade::connect(&url).await, ErrorKind::Denied);
    let url = with(&url, &format!("token_file={}", token.display()));
    let client = palisade::connect(&url).await.unwrap();
    fails(client.mutex("other/x").try_lock().await, ErrorKind::Denied);
    // A namespace is a prefix, as in the access file.
    let url = with(&url, "namespace=billing");
    let billing = palisade::connect(&url).await.unwrap();
    let hold = billing.mutex("card").lock().await.unwrap();
    let there = client.mutex("billing/card").try_lock().await.unwrap();
    assert!(there.is_none(), "another lock");
    let name = hold.name().clone();
    let evict = billing.evict(&name, palisade::Which::Holders, palisade::Eviction::Remove);
    fails(soon("the refusal", evict).await, ErrorKind::Denied);
    assert!(hold.is_valid());
    hold.release().await.unwrap();
}
