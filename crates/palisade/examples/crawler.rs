//! Crawlers that take one domain each: the first of their list that no other crawler is at.

use std::collections::BTreeMap;
use std::sync::Mutex;

use palisade::Patience;

const DOMAINS: [&str; 3] = ["example.com", "example.net", "example.org"];

#[tokio::main(flavor = "current_thread")]
async fn main() -> palisade::Result<()> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let crawled = Mutex::new(BTreeMap::<String, Vec<usize>>::new());
    let everyone_is_at_work = tokio::sync::Barrier::new(DOMAINS.len());

    let crawler = async |number: usize| {
        let client = palisade::connect(&url).await?;
        let names = DOMAINS.map(|domain| format!("examples/crawl/{domain}"));
        // Skips those that are locked, and waits if all of them are.
        let hold = client.lock_any(names, Patience::Forever).await?;
        let hold = hold.expect("it waits as long as it takes");
        hold.run(async {
            println!("crawler {number} takes {}", hold.name());
            let name = hold.name().to_string();
            let mine = |all: &mut BTreeMap<_, Vec<_>>| all.entry(name).or_default().push(number);
            mine(&mut crawled.lock().expect("nobody panics"));
            everyone_is_at_work.wait().await;
        })
        .await?;
        hold.release().await
    };
    let (one, two, three) = tokio::join!(crawler(1), crawler(2), crawler(3));
    one.and(two).and(three)?;
    let crawled = crawled.into_inner().expect("nobody panics");
    assert_eq!(
        crawled.len(),
        DOMAINS.len(),
        "each took another: {crawled:?}"
    );
    Ok(())
}
