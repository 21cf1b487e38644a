//! `fence::open`: which engines keep a fence, and where.

#![cfg(all(feature = "file", feature = "memory"))]
#![allow(clippy::unwrap_used)]

use palisade::fence::{FenceExt, Verdict, open};
use palisade::{ErrorKind, Name, Token};

fn name() -> Name {
    Name::new("a/b c").unwrap()
}

#[tokio::test]
async fn the_fence_of_a_store_is_kept_beside_it_for_each_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let url = |more: &str| format!("file:{}/store{more}", dir.path().display());
    let fence = open(&url("")).await.unwrap();
    fence.accept(&name(), 5.into()).await.unwrap();
    let check = async |url: &str| {
        let fence = open(url).await.unwrap();
        fence.check(&name(), Token(4)).await.unwrap()
    };
    let stale = Verdict::Stale { highest: Token(5) };
    assert_eq!(check(&url("?ttl=5s")).await, stale);
    assert_eq!(check(&url("?namespace=other")).await, Verdict::Accepted);
    assert_eq!(check(&url("?namespace=")).await, Verdict::Accepted);
    // The store still works.
    palisade::connect(&url("")).await.unwrap();

    let kind = async |url: &str| open(url).await.err().unwrap().kind();
    assert_eq!(kind("memory:").await, ErrorKind::Unsupported);
    assert_eq!(kind("bananas:").await, ErrorKind::Config);
    assert_eq!(kind(&url("?tll=5s")).await, ErrorKind::Config);
}
