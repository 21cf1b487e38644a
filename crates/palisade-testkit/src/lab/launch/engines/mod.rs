//! How each engine is started. One file per product; each gives nodes that are started, and how
//! to see that the whole of them is ready and who leads.

pub(super) mod consul;
pub(super) mod etcd;
pub(super) mod postgres;
pub(super) mod redis;
pub(super) mod redis_sets;
pub(super) mod zookeeper;

/// The settings as owned arguments.
fn owned(settings: &[&str]) -> Vec<String> {
    settings.iter().map(|&setting| setting.to_owned()).collect()
}

/// What most of those that were asked answer; `None` when nobody does.
fn most(answers: impl Iterator<Item = usize>) -> Option<usize> {
    let mut votes = std::collections::BTreeMap::<usize, usize>::new();
    for answer in answers {
        *votes.entry(answer).or_default() += 1;
    }
    let most = votes.into_iter().max_by_key(|(_, votes)| *votes);
    most.map(|(answer, _)| answer)
}
