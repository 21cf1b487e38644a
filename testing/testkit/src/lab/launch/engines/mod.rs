//! How each engine is started, one file per product. Each returns started nodes, and functions to
//! check that they are ready and who leads.

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

/// The most common answer; `None` if there is none.
fn most(answers: impl Iterator<Item = usize>) -> Option<usize> {
    let mut votes = std::collections::BTreeMap::<usize, usize>::new();
    for answer in answers {
        *votes.entry(answer).or_default() += 1;
    }
    let most = votes.into_iter().max_by_key(|(_, votes)| *votes);
    most.map(|(answer, _)| answer)
}
