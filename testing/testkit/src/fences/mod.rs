//! The conformance suite of fenced storage: what every [`Fence`] promises, as cases that can fail.
//!
//! Each case is named after the `# Behavior` line that it tests, has its own resource, and may open
//! the store repeatedly: what is stored must outlive the handle that wrote it.

#![allow(clippy::unwrap_used)] // A panic is how a case fails.

use futures_util::future::LocalBoxFuture;
use palisade::engine::{BoxFuture, Era};
use palisade::fence::{Fence, FenceExt, Presented, ReadToken, Rule, SharedFence, Taken, Verdict};
use palisade::{ErrorKind, Name, Outcome, Result, Token};

/// Opens a store; may be called repeatedly.
pub type Open<'a> = &'a dyn Fn(Rule) -> BoxFuture<Result<SharedFence>>;

/// A store and a fresh resource.
struct Bed<'a> {
    open: Open<'a>,
    resource: Name,
}

impl Bed<'_> {
    async fn fence(&self) -> SharedFence {
        (self.open)(Rule::NotOlder).await.unwrap()
    }

    async fn strict(&self) -> SharedFence {
        (self.open)(Rule::Strict).await.unwrap()
    }

    async fn write(&self, fence: &SharedFence, token: u64, data: &str) -> Verdict {
        let data = data.as_bytes().to_vec();
        let written = fence.write(&self.resource, token.into(), data).await;
        written.unwrap()
    }

    async fn take(&self, fence: &SharedFence, token: u64) -> Taken {
        fence.take(&self.resource, token.into()).await.unwrap()
    }

    /// The highest token and the data.
    async fn kept(&self, fence: &SharedFence) -> Option<(u64, String)> {
        let kept = fence.read(&self.resource).await.unwrap();
        kept.map(|kept| (kept.token.0, String::from_utf8(kept.data).unwrap()))
    }
}

const fn stale(highest: u64) -> Verdict {
    let highest = Token(highest);
    Verdict::Stale { highest }
}

fn taken(data: Option<&str>) -> Taken {
    let data = data.map(|data| data.as_bytes().to_vec());
    Taken::Accepted { data }
}

const fn stale_take(highest: u64) -> Taken {
    let highest = Token(highest);
    Taken::Stale { highest }
}

type Run = for<'a> fn(Bed<'a>) -> LocalBoxFuture<'a, ()>;

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        /// All cases, by name.
        const CASES: &[(&str, Run)] = &[$((stringify!($case), |bed| Box::pin($case(bed)))),*];
    };
}

cases![
    an_unknown_resource_has_neither_token_nor_data,
    a_lower_token_is_stale_also_when_opened_again,
    an_equal_token_is_accepted_again,
    a_strict_fence_takes_each_token_once,
    a_greater_token_is_remembered_with_its_era,
    what_is_no_token_is_refused,
    a_token_is_remembered_without_data_and_leaves_data_alone,
    a_check_remembers_nothing,
    a_reader_is_compared_and_never_remembered,
    any_bytes_come_back,
    resources_and_their_names_are_kept_apart,
    a_forgotten_resource_takes_any_token,
    concurrent_writers_leave_the_data_of_the_highest_token,
    who_takes_before_it_reads_loses_no_accepted_write,
    a_take_tells_nothing_from_nothing_written,
    a_take_judges_as_a_write_does,
    a_strict_take_keeps_its_token_for_one_write,
    a_write_in_flight_is_in_what_is_taken_or_stale,
    a_read_change_write_of_many_holders_loses_nothing,
];

/// Runs every case on a store.
///
/// # Panics
/// With the name of a case that fails.
pub async fn conforms(store: &str, open: Open<'_>) {
    for (name, run) in CASES {
        println!("{store}: {name}");
        let resource = Name::new(format!("{name}-{:016x}", rand::random::<u64>())).unwrap();
        run(Bed { open, resource }).await;
    }
}

async fn an_unknown_resource_has_neither_token_nor_data(bed: Bed<'_>) {
    let fence = bed.fence().await;
    assert_eq!(bed.kept(&fence).await, None);
    assert_eq!(fence.highest(&bed.resource).await.unwrap(), None);
    assert!(!fence.forget(&bed.resource).await.unwrap());
    let checked = fence.check(&bed.resource, Token(1)).await;
    assert_eq!(checked.unwrap(), Verdict::Accepted);
}

async fn a_lower_token_is_stale_also_when_opened_again(bed: Bed<'_>) {
    let fence = bed.fence().await;
    assert_eq!(bed.write(&fence, 5, "five").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, 7, "seven").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, 6, "six").await, stale(7));
    let again = bed.fence().await;
    assert_eq!(bed.write(&again, 6, "six").await, stale(7));
    assert_eq!(bed.kept(&again).await.unwrap(), (7, "seven".to_owned()));
    let accepted = again.accept(&bed.resource, 6.into()).await;
    assert_eq!(accepted.unwrap(), stale(7));
}

async fn an_equal_token_is_accepted_again(bed: Bed<'_>) {
    let fence = bed.fence().await;
    for data in ["one", "two", "three"] {
        assert_eq!(bed.write(&fence, 5, data).await, Verdict::Accepted);
    }
    let accepted = fence.accept(&bed.resource, 5.into()).await;
    assert_eq!(accepted.unwrap(), Verdict::Accepted);
    assert_eq!(bed.kept(&fence).await.unwrap(), (5, "three".to_owned()));
}

async fn a_strict_fence_takes_each_token_once(bed: Bed<'_>) {
    let fence = bed.strict().await;
    assert_eq!(bed.write(&fence, 5, "five").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, 5, "five again").await, stale(5));
    let accepted = fence.accept(&bed.resource, 5.into()).await;
    assert_eq!(accepted.unwrap(), stale(5));
    assert_eq!(bed.write(&fence, 4, "four").await, stale(5));
    assert_eq!(bed.write(&fence, 6, "six").await, Verdict::Accepted);
    assert_eq!(bed.kept(&fence).await.unwrap(), (6, "six".to_owned()));
    // A writer may read what it wrote.
    let read = fence.check(&bed.resource, ReadToken::from(Token(6))).await;
    assert_eq!(read.unwrap(), Verdict::Accepted);
}

async fn a_greater_token_is_remembered_with_its_era(bed: Bed<'_>) {
    let fence = bed.fence().await;
    // Adjacent numbers beyond the precision of a double, then a later era that starts at one.
    let late = (1 << 56) - 2;
    let next = Era::new(1).unwrap().stamp(1).unwrap().0;
    let last = Era::new(127).unwrap().stamp((1 << 56) - 1).unwrap().0;
    assert_eq!(bed.write(&fence, late, "").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, late + 1, "").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, late, "").await, stale(late + 1));
    assert_eq!(bed.write(&fence, 9, "").await, stale(late + 1));
    assert_eq!(bed.write(&fence, next, "").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, late + 1, "").await, stale(next));
    assert_eq!(bed.write(&fence, last, "").await, Verdict::Accepted);
    let highest = fence.highest(&bed.resource).await.unwrap();
    assert_eq!(highest, Some(Token(last)));
}

async fn what_is_no_token_is_refused(bed: Bed<'_>) {
    let fence = bed.fence().await;
    for bad in [0, 1 << 63, u64::MAX] {
        let kind = |error: palisade::Error| error.kind();
        let written = fence.write(&bed.resource, bad.into(), Vec::new()).await;
        assert_eq!(written.map_err(kind), Err(ErrorKind::InvalidArgument));
        let accepted = fence.accept(&bed.resource, bad.into()).await;
        assert_eq!(accepted.map_err(kind), Err(ErrorKind::InvalidArgument));
        let checked = fence.check(&bed.resource, Token(bad)).await;
        assert_eq!(checked.map_err(kind), Err(ErrorKind::InvalidArgument));
    }
    assert_eq!(bed.kept(&fence).await, None);
}

async fn a_token_is_remembered_without_data_and_leaves_data_alone(bed: Bed<'_>) {
    let fence = bed.fence().await;
    let accept = async |token: u64| fence.accept(&bed.resource, token.into()).await.unwrap();
    assert_eq!(accept(5).await, Verdict::Accepted);
    assert_eq!(accept(4).await, stale(5));
    assert_eq!(bed.kept(&fence).await.unwrap(), (5, String::new()));
    assert_eq!(bed.write(&fence, 4, "four").await, stale(5));
    assert_eq!(bed.write(&fence, 6, "six").await, Verdict::Accepted);
    assert_eq!(accept(7).await, Verdict::Accepted);
    assert_eq!(bed.kept(&fence).await.unwrap(), (7, "six".to_owned()));
}

async fn a_check_remembers_nothing(bed: Bed<'_>) {
    let fence = bed.fence().await;
    bed.write(&fence, 5, "five").await;
    let check = async |token: u64| fence.check(&bed.resource, Token(token)).await.unwrap();
    assert_eq!(check(9).await, Verdict::Accepted);
    assert_eq!(check(5).await, Verdict::Accepted);
    assert_eq!(check(4).await, stale(5));
    assert_eq!(bed.write(&fence, 6, "six").await, Verdict::Accepted);
}

async fn a_reader_is_compared_and_never_remembered(bed: Bed<'_>) {
    let fence = bed.fence().await;
    bed.write(&fence, 5, "five").await;
    let reader = |token: u64| Presented::Read(Token(token).into());
    let read = async |token| fence.check(&bed.resource, reader(token)).await.unwrap();
    assert_eq!(read(9).await, Verdict::Accepted);
    assert_eq!(read(4).await, stale(5));
    let highest = fence.highest(&bed.resource).await.unwrap();
    assert_eq!(highest, Some(Token(5)));
    assert_eq!(bed.write(&fence, 6, "six").await, Verdict::Accepted);
}

async fn any_bytes_come_back(bed: Bed<'_>) {
    let fence = bed.fence().await;
    let all: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    for (token, data) in [(1, Vec::new()), (2, all), (3, b"\r\n\0'\"".to_vec())] {
        let written = fence.write(&bed.resource, token.into(), data.clone()).await;
        assert_eq!(written.unwrap(), Verdict::Accepted);
        let kept = fence.read(&bed.resource).await.unwrap().unwrap();
        assert!(kept.data == data, "{} bytes", data.len());
    }
}

async fn resources_and_their_names_are_kept_apart(bed: Bed<'_>) {
    let fence = bed.fence().await;
    let names = [
        "a", "A", "a/b", "a%2Fb", "a b", "a'b", "ü", "a:b", "a.data", "a,b",
    ];
    let names = names.map(|name| Name::new(format!("{name}-{}", bed.resource)).unwrap());
    for (at, name) in names.iter().enumerate() {
        let data = name.as_str().as_bytes().to_vec();
        let written = fence.write(name, (100 - at as u64).into(), data).await;
        assert_eq!(written.unwrap(), Verdict::Accepted, "{name}");
    }
    for (at, name) in names.iter().enumerate() {
        let kept = fence.read(name).await.unwrap().unwrap();
        let kept = (kept.token.0, String::from_utf8(kept.data).unwrap());
        assert_eq!(kept, (100 - at as u64, name.to_string()));
    }
}

async fn a_forgotten_resource_takes_any_token(bed: Bed<'_>) {
    let fence = bed.fence().await;
    bed.write(&fence, 9, "nine").await;
    assert!(fence.forget(&bed.resource).await.unwrap());
    assert_eq!(bed.kept(&fence).await, None);
    assert!(!fence.forget(&bed.resource).await.unwrap());
    assert_eq!(bed.write(&fence, 1, "one").await, Verdict::Accepted);
    assert_eq!(bed.kept(&fence).await.unwrap(), (1, "one".to_owned()));
}

async fn concurrent_writers_leave_the_data_of_the_highest_token(bed: Bed<'_>) {
    let (one, two) = (bed.fence().await, bed.fence().await);
    let writers = (1..=20u64).rev().map(|token| {
        let fence = if token % 2 == 0 { &one } else { &two };
        let (fence, resource) = (fence.clone(), bed.resource.clone());
        tokio::spawn(async move {
            let data = token.to_string().into_bytes();
            fence.write(&resource, token.into(), data).await.unwrap()
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    assert_eq!(bed.kept(&one).await.unwrap(), (20, "20".to_owned()));
}

/// Two holders add to one resource, the first is paused before its write. `takes`: whether the second
/// takes or only reads. Returns the verdict about the first one's write, and what is kept.
async fn paused_before_its_write(bed: &Bed<'_>, takes: bool) -> (Verdict, String) {
    let (zombie, fence) = (bed.fence().await, bed.fence().await);
    assert_eq!(bed.write(&zombie, 5, "old").await, Verdict::Accepted);
    // The first, with token 5, has read and is paused. The second is granted 7.
    let seen = if takes {
        match bed.take(&fence, 7).await {
            Taken::Accepted { data } => String::from_utf8(data.unwrap()).unwrap(),
            stale @ Taken::Stale { .. } => panic!("{stale:?}"),
        }
    } else {
        bed.kept(&fence).await.unwrap().1
    };
    let late = bed.write(&zombie, 5, "old+first").await;
    let written = bed.write(&fence, 7, &format!("{seen}+second")).await;
    assert_eq!(written, Verdict::Accepted);
    (late, bed.kept(&fence).await.unwrap().1)
}

/// The control comes first: who only reads loses a write that was accepted.
async fn who_takes_before_it_reads_loses_no_accepted_write(bed: Bed<'_>) {
    let (late, kept) = paused_before_its_write(&bed, false).await;
    assert_eq!((late, kept.as_str()), (Verdict::Accepted, "old+second"));
    assert!(bed.fence().await.forget(&bed.resource).await.unwrap());
    let (late, kept) = paused_before_its_write(&bed, true).await;
    assert_eq!((late, kept.as_str()), (stale(7), "old+second"));
}

async fn a_take_tells_nothing_from_nothing_written(bed: Bed<'_>) {
    let fence = bed.fence().await;
    assert_eq!(bed.take(&fence, 5).await, taken(None));
    assert_eq!(bed.kept(&fence).await.unwrap(), (5, String::new()));
    // The mark stands before there is data.
    assert_eq!(bed.write(&fence, 4, "late").await, stale(5));
    assert_eq!(bed.take(&fence, 5).await, taken(None));
    assert_eq!(bed.write(&fence, 5, "").await, Verdict::Accepted);
    assert_eq!(bed.take(&fence, 6).await, taken(Some("")));
    assert_eq!(bed.write(&fence, 6, "six").await, Verdict::Accepted);
    let again = bed.fence().await;
    assert_eq!(bed.take(&again, 6).await, taken(Some("six")));
    assert_eq!(bed.take(&again, 8).await, taken(Some("six")));
    assert_eq!(bed.kept(&again).await.unwrap(), (8, "six".to_owned()));
}

async fn a_take_judges_as_a_write_does(bed: Bed<'_>) {
    let fence = bed.fence().await;
    let last = Era::new(127).unwrap().stamp((1 << 56) - 1).unwrap().0;
    assert_eq!(bed.write(&fence, 7, "seven").await, Verdict::Accepted);
    assert_eq!(bed.take(&fence, 6).await, stale_take(7));
    assert_eq!(bed.take(&fence, 1).await, stale_take(7));
    assert_eq!(bed.kept(&fence).await.unwrap(), (7, "seven".to_owned()));
    assert_eq!(bed.take(&fence, last).await, taken(Some("seven")));
    assert_eq!(bed.take(&fence, last - 1).await, stale_take(last));
    for bad in [0, 1 << 63, u64::MAX] {
        let taken = fence.take(&bed.resource, bad.into()).await;
        let kind = taken.map_err(|error| error.kind());
        assert_eq!(kind, Err(ErrorKind::InvalidArgument));
    }
}

async fn a_strict_take_keeps_its_token_for_one_write(bed: Bed<'_>) {
    let fence = bed.strict().await;
    // Nothing is older than the first token.
    assert_eq!(bed.take(&fence, 1).await, taken(None));
    assert_eq!(bed.write(&fence, 1, "one").await, Verdict::Accepted);
    assert_eq!(bed.take(&fence, 1).await, stale_take(1));
    assert_eq!(bed.write(&fence, 5, "five").await, Verdict::Accepted);
    // The token below is in use already, and one far below.
    for token in [6, 9] {
        assert_eq!(bed.take(&fence, token).await, taken(Some("five")));
        assert_eq!(bed.take(&fence, token).await, taken(Some("five")));
        assert_eq!(bed.write(&fence, token - 1, "late").await, stale(token - 1));
        assert_eq!(bed.take(&fence, token - 1).await, stale_take(token - 1));
    }
    assert_eq!(bed.write(&fence, 9, "nine").await, Verdict::Accepted);
    assert_eq!(bed.write(&fence, 9, "again").await, stale(9));
    assert_eq!(bed.take(&fence, 9).await, stale_take(9));
    assert_eq!(bed.kept(&fence).await.unwrap(), (9, "nine".to_owned()));
}

async fn a_write_in_flight_is_in_what_is_taken_or_stale(bed: Bed<'_>) {
    let (zombie, fence) = (bed.fence().await, bed.fence().await);
    for round in 0..20u64 {
        let (old, new) = (2 * round + 1, 2 * round + 2);
        let (zombie, resource) = (zombie.clone(), bed.resource.clone());
        let data = old.to_string();
        let flight = zombie.write(&resource, old.into(), data.clone().into_bytes());
        let flight = tokio::spawn(flight);
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        let seen = match bed.take(&fence, new).await {
            Taken::Accepted { data } => data.map(|data| String::from_utf8(data).unwrap()),
            stale @ Taken::Stale { .. } => panic!("{stale:?}"),
        };
        match flight.await.unwrap().unwrap() {
            Verdict::Accepted => assert_eq!(seen, Some(data), "round {round}"),
            stale => assert_eq!((stale, seen == Some(data)), (self::stale(new), false)),
        }
    }
}

/// Asks again while a busy store does nothing: on a slow disk others may be at it for long.
async fn patient<T>(ask: impl Fn() -> BoxFuture<Result<T>>) -> T {
    loop {
        match ask().await {
            Err(error) if error.is_transient() && error.outcome() == Outcome::NotApplied => {
                tokio::task::yield_now().await;
            }
            answer => return answer.unwrap(),
        }
    }
}

/// Nobody waits for anybody: what is accepted is never lost, whoever is replaced.
async fn a_read_change_write_of_many_holders_loses_nothing(bed: Bed<'_>) {
    let (one, two) = (bed.fence().await, bed.fence().await);
    let holders = (1..=24u64).map(|token| {
        let fence = if token % 2 == 0 { &one } else { &two };
        let (fence, resource) = (fence.clone(), bed.resource.clone());
        tokio::spawn(async move {
            let taken = patient(|| fence.take(&resource, token.into())).await;
            let Taken::Accepted { data } = taken else {
                return None;
            };
            let mut chain = data.unwrap_or_default();
            chain.push(u8::try_from(token).unwrap());
            let write = || fence.write(&resource, token.into(), chain.clone());
            let written = patient(write).await;
            (written == Verdict::Accepted).then_some(token)
        })
    });
    let mut accepted = Vec::new();
    for holder in holders.collect::<Vec<_>>() {
        accepted.extend(holder.await.unwrap());
    }
    let kept = one.read(&bed.resource).await.unwrap().unwrap();
    let kept: Vec<u64> = kept.data.into_iter().map(u64::from).collect();
    accepted.sort_unstable();
    assert_eq!(
        kept, accepted,
        "the chain has every accepted write, in order"
    );
}
