//! Orders for several workers: each order is in the hands of one at a time, those of a customer are
//! handled in their order, and none is lost when a worker gives up in the middle of one.
//!
//! Delivery is at least once, so that an order may come again after its effect. The ledger is a fenced
//! store, written under the order's id: an order that comes again is written as it was, and the late
//! write of a worker that was replaced is refused.

use std::collections::BTreeMap;
use std::time::Duration;

use palisade::fence::{self, Fence};
use palisade::queue::{Draft, Message, Queue, Retries};
use palisade::{Name, Result};
use tokio::task::JoinSet;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let orders = palisade::connect(&url).await?.queue("examples/orders");
    let orders = orders.retries(Retries {
        attempts: 3,
        min: Duration::from_millis(10),
        max: Duration::from_secs(1),
    });

    for number in 0..12 {
        let order = Draft::new(format!("order {number}")).key(format!("customer-{}", number % 3));
        let order = order.id(format!("order-{number}"));
        orders.push(order.clone()).await?;
        // Again, as after a reply that was lost: it is stored once.
        assert!(orders.push(order).await?.duplicate);
    }

    let mut workers = JoinSet::new();
    for _ in 0..4 {
        let (orders, ledger) = (orders.clone(), fence::open(&url).await?);
        workers.spawn(async move { work(&orders, &*ledger).await });
    }
    // A service would go on for ever.
    let mut handled: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    while orders.report().await?.is_some_and(|left| left.total() > 0) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    workers.shutdown().await;

    let ledger = fence::open(&url).await?;
    for number in 0..12 {
        let order = Name::new(format!("order-{number}"))?;
        let entry = ledger.read(&order).await?.expect("no order is lost");
        let customer = String::from_utf8_lossy(&entry.data).into_owned();
        handled.entry(customer).or_default().push(number);
    }
    println!("{handled:?}");
    assert_eq!(handled["customer-1"], [1, 4, 7, 10]);
    Ok(())
}

/// Handles orders as they come. Dropped, it gives back what it has in hand.
async fn work(orders: &Queue, ledger: &dyn Fence) -> Result<()> {
    loop {
        let order = orders.next().await?;
        // Dropped at once if the order is lost to another worker.
        match order.run(handle(&order, ledger)).await {
            Ok(Ok(())) => order.done().await?,
            Ok(Err(why)) => drop(order.fail(why).await?),
            // Another worker has it now.
            Err(_) => {}
        }
    }
}

async fn handle(order: &Message, ledger: &dyn Fence) -> Result<(), String> {
    // A partner that is down when it is first asked.
    if order.id() == "order-5" && order.attempt() == 1 {
        return Err("the partner does not answer".into());
    }
    let name = Name::new(order.id()).map_err(|error| error.to_string())?;
    let customer = order.key().unwrap_or_default().into();
    let written = ledger.write(&name, order.token().into(), customer).await;
    written.map(drop).map_err(|error| error.to_string())
}
