//! One leader among several nodes. The old one drains its work before it hands over, and only then
//! does the next begin.

use palisade::{Elected, Election};
use tokio::sync::{mpsc, oneshot};

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let client = palisade::connect(&url).await?;
    let election = client.election("examples/scheduler");
    let (log, mut said) = mpsc::unbounded_channel();
    let (stop_anna, anna_stops) = oneshot::channel();
    let (stop_ben, ben_stops) = oneshot::channel();

    let anna = tokio::spawn(node(election.clone(), "anna", anna_stops, log.clone()));
    assert_eq!(said.recv().await.as_deref(), Some("anna leads"));
    let ben = tokio::spawn(node(election.clone(), "ben", ben_stops, log));

    // A deploy: Anna is asked to end.
    let _ = stop_anna.send(());
    anna.await.expect("no node panics")?;
    assert_eq!(said.recv().await.as_deref(), Some("anna has drained"));
    assert_eq!(said.recv().await.as_deref(), Some("ben leads"));
    let _ = stop_ben.send(());
    ben.await.expect("no node panics")
}

/// Leads until it is told to stop, and then ends what it has begun.
async fn node(
    election: Election,
    name: &'static str,
    stop: oneshot::Receiver<()>,
    log: mpsc::UnboundedSender<String>,
) -> palisade::Result<()> {
    let leads: Elected = election.campaign(name).await?;
    let say = |what: &str| {
        println!("{name} {what}");
        let _ = log.send(format!("{name} {what}"));
    };
    let work = async {
        say("leads");
        let _ = stop.await;
        // What was taken on is done first: nobody else leads until then.
        say("has drained");
    };
    // Dropped in the middle if the leadership is lost: then there is nothing to hand over.
    leads.hold().run(work).await?;
    leads.resign().await
}
