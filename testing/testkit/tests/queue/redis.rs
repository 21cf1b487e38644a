//! What is specific to Redis: a user's effect as one step with `done`.

use palisade::ErrorKind;
use palisade::config::redis;
use palisade::engines::redis::{Effect, RedisMessage};
use palisade::queue::{Draft, Pick};

use crate::{Fixture, cases, running};

cases! {
    an_effect_and_done_are_one_step,
    the_effect_of_a_lost_message_does_not_happen,
}

/// Increments a counter of this case.
fn count(fx: &Fixture) -> Effect {
    Effect::new("return redis.call('INCR', KEYS[1])").key(key(fx))
}

fn key(fx: &Fixture) -> String {
    format!("effect {}", fx.url)
}

async fn counted(fx: &Fixture) -> Option<u64> {
    let client = redis::Client::open(running("redis").unwrap().url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut get = redis::cmd("GET");
    get.arg(key(fx)).query_async(&mut connection).await.unwrap()
}

async fn an_effect_and_done_are_one_step(fx: Fixture) {
    let queue = fx.queue().await;
    queue.push(Draft::new("x").key("k")).await.unwrap();
    queue.push(Draft::new("y").key("k")).await.unwrap();
    for times in 1..=2 {
        let message = queue.next().await.unwrap();
        let answer = message.done_with(count(&fx)).await.unwrap();
        assert_eq!(answer, redis::Value::Int(times));
    }
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 0);
    // An effect that fails does not end the claim.
    queue.push("z").await.unwrap();
    let message = queue.next().await.unwrap();
    message
        .done_with(Effect::new("return redis.call('NONSENSE')"))
        .await
        .unwrap_err();
    assert_eq!(queue.report().await.unwrap().unwrap().total(), 1);
}

async fn the_effect_of_a_lost_message_does_not_happen(fx: Fixture) {
    let queue = fx.queue().await;
    for key in [None, Some("k")] {
        let mut draft = Draft::new("x").id("it");
        draft.key = key.map(str::to_owned);
        queue.push(draft).await.unwrap();
        let message = queue.next().await.unwrap();
        let it = Pick::Id("it".to_owned());
        assert_eq!(queue.drop_messages(it, true).await.unwrap(), 1);
        let late = message.done_with(count(&fx)).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Lost);
    }
    assert_eq!(counted(&fx).await, None);
}
