//! A service that other programs write to, behind the fencing layer: whoever lost the lock gets a 409.

use axum::body::Body;
use axum::extract::Path;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use axum::{Extension, Router};
use palisade::fence::http::{FenceLayer, FencedRequest};
use palisade::fence::{self, WriteToken};
use palisade::{Eviction, Which};
use tower_service::Service;

/// Writes to a store of its own, with the token that the layer has checked.
async fn write(
    Path(sku): Path<String>,
    Extension(token): Extension<WriteToken>,
    body: String,
) -> String {
    println!("UPDATE stock SET n = {body}, fence = {token} WHERE sku = '{sku}'");
    body
}

/// Reads for a holder that is going to write: the layer has raised its token before.
async fn read(Path(sku): Path<String>, Extension(token): Extension<WriteToken>) -> String {
    println!("UPDATE stock SET fence = {token} WHERE sku = '{sku}' RETURNING n");
    "10".into()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("PALISADE_URL").unwrap_or("file:".into());
    let (client, storage) = (palisade::connect(&url).await?, fence::open(&url).await?);
    let mut service = Router::new()
        .route("/examples/stock/{sku}", get(read).put(write))
        .layer(FenceLayer::by_path(storage));

    let lock = client.mutex("examples/stock/A7");
    let ben = lock.lock().await?;
    let bens = Request::put("/examples/stock/A7").fenced_by(&ben)?;
    client
        .evict(ben.name(), Which::Holders, Eviction::Remove)
        .await?;
    let anna = lock.lock().await?;

    // She takes before she reads: Ben's late request can't come between her read and her write.
    let taking = Request::get("/examples/stock/A7").taken_by(&anna)?;
    let answer = service.call(taking.body(Body::empty())?).await?;
    assert_eq!(answer.status(), StatusCode::OK);
    let answer = service.call(bens.body(Body::from("8"))?).await?;
    assert_eq!(answer.status(), StatusCode::CONFLICT);
    println!("Ben's request: {}", answer.status());
    let annas = Request::put("/examples/stock/A7").fenced_by(&anna)?;
    let answer = service.call(annas.body(Body::from("9"))?).await?;
    assert_eq!(answer.status(), StatusCode::OK);
    Ok(anna.release().await?)
}
