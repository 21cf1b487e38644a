//! Two candidates, one leader; when it resigns the other takes over with a greater token.

#![allow(clippy::unwrap_used)]

use futures_util::StreamExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let palisade = palisade::connect("memory:").await?;
    let election = palisade.election("scheduler");
    let mut seen = Box::pin(election.observe());

    let anna = election.campaign("anna").await?;
    let ben = tokio::spawn({
        let election = election.clone();
        async move { election.campaign("ben").await }
    });
    println!(
        "leader: {:?}",
        seen.next().await.unwrap()?.and_then(|leader| leader.value)
    );

    let first = anna.hold().token();
    anna.resign().await?;
    let ben = ben.await.unwrap()?;
    assert!(ben.hold().token() > first);
    println!(
        "then:   {:?}",
        election.leader().await?.and_then(|leader| leader.value)
    );
    ben.resign().await
}
