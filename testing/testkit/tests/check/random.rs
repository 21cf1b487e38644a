//! Random valid histories pass; the same histories are refused after tampering.

use palisade_testkit::lab::check::{Index, Invariant as I, Verdict};
use palisade_testkit::lab::history::{Answer, History, What};
use proptest::prelude::*;

use crate::simulated::history;
use crate::support::{params, valid};

const LOCK: &[I] = &[
    I::BelievedExclusion,
    I::TokenOrder,
    I::BoundedLeak,
    I::Progress,
    I::Fifo,
    I::EarlyLoss,
    I::NoForeignRelease,
    I::HonestUnknown,
    I::NoSpuriousLoss,
];

fn refused(invariant: I, history: &History) -> bool {
    matches!(invariant.check(history, &params()), Verdict::Violated(_))
}

/// Applies `tamper`, which returns whether it found something to change.
fn tampered(
    history: &History,
    tamper: impl FnOnce(&mut History, &Index<'_>) -> bool,
) -> Option<History> {
    let index = Index::new(history).unwrap();
    let mut copy = history.clone();
    tamper(&mut copy, &index).then(|| History::of(copy.events))
}

fn set_token(history: &mut History, claim: &str, new: u64) {
    for event in &mut history.events {
        match &mut event.what {
            What::AcquireReturned {
                answer: Answer::Held { token, claim: of },
                ..
            }
            | What::Valid { token, claim: of }
            | What::Lost {
                token, claim: of, ..
            }
            | What::ReleaseCalled {
                token, claim: of, ..
            }
            | What::ReleaseReturned {
                token, claim: of, ..
            } if of == claim => {
                *token = new;
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_true_history_passes(seed: u64, clients in 2usize..6) {
        let history = history(seed, clients, 2500);
        for invariant in LOCK {
            let verdict = invariant.check(&history, &params());
            // A short history may lack what a checker needs.
            let fine = matches!(verdict, Verdict::Ok | Verdict::Undecided(_));
            prop_assert!(fine, "{invariant}: {verdict}");
        }
        prop_assert!(I::BelievedExclusion.check(&history, &params()).is_ok());
    }

    #[test]
    fn swapped_tokens_are_refused(seed: u64, pick: prop::sample::Index) {
        let history = history(seed, 4, 2000);
        let swapped = tampered(&history, |copy, index| {
            let Some(at) = (!index.holds.is_empty()).then(|| pick.index(index.holds.len())) else {
                return false;
            };
            let first = &index.holds[at];
            let later = |h: &&palisade_testkit::lab::check::Held<'_>| {
                index.at(h.called) > index.at(first.granted)
            };
            let Some(second) = index.holds.iter().find(later) else { return false };
            set_token(copy, first.claim, second.token);
            set_token(copy, second.claim, first.token);
            true
        });
        prop_assume!(swapped.is_some());
        prop_assert!(refused(I::TokenOrder, &swapped.unwrap()));
    }

    #[test]
    fn a_release_put_off_beyond_the_next_grant_is_refused(seed: u64, pick: prop::sample::Index) {
        let history = history(seed, 4, 2000);
        let overlapped = tampered(&history, |copy, index| {
            let pairs: Vec<_> = index.holds.windows(2).filter(|pair| {
                // The owner released, and neither client was disturbed until the next grant.
                let (Some(release), Some(_)) = (pair[0].release, pair[0].released) else {
                    return false;
                };
                let next = index.at(pair[1].granted);
                let both = [pair[0].client, pair[1].client];
                let calm = both.iter().all(|client| {
                    let window = palisade_testkit::lab::check::Window { from: index.at(release), until: next + 2 };
                    !index.was_hurt(client, window)
                });
                pair[0].lost.is_none() && pair[0].client != pair[1].client && calm
                    && pair[1].until > next + 1
            }).collect();
            if pairs.is_empty() {
                return false;
            }
            let pair = pairs[pick.index(pairs.len())];
            let late = index.at(pair[1].granted) + 1;
            let call = pair[0].release.unwrap();
            let owner = pair[0].client;
            let first_release = index.at(call);
            // Delays everything that the first owner did from its release on.
            let mut shift = 0;
            for (at, event) in copy.events.iter_mut().enumerate() {
                if event.client == owner && at >= call && event.at >= first_release {
                    event.at = event.at.max(late + shift);
                    shift += 1;
                }
            }
            true
        });
        prop_assume!(overlapped.is_some());
        prop_assert!(refused(I::BelievedExclusion, &overlapped.unwrap()));
    }

    #[test]
    fn a_loss_left_out_is_refused(seed: u64, lie: bool) {
        let history = history(seed, 4, 4000);
        let silent = tampered(&history, |copy, index| {
            let replaced = index.holds.iter().find(|hold| {
                let next = index.holds.iter().find(|next| next.token > hold.token);
                match (hold.lost, hold.release, next) {
                    // Replaced before its loss was reported, and not disturbed after that.
                    (Some(lost), Some(release), Some(next)) => {
                        let window = palisade_testkit::lab::check::Window {
                            from: index.at(lost) + 1,
                            until: index.at(release),
                        };
                        index.at(next.granted) < index.at(lost)
                            && !index.was_hurt(hold.client, window)
                    }
                    _ => false,
                }
            });
            let Some(hold) = replaced else { return false };
            let lost = hold.lost.unwrap();
            if lie { copy.events[lost].what = valid(hold.token) } else {  copy.events.remove(lost);  }
            true
        });
        prop_assume!(silent.is_some());
        prop_assert!(refused(I::EarlyLoss, &silent.unwrap()));
    }

    #[test]
    fn a_grant_out_of_line_is_refused(seed: u64) {
        let history = history(seed, 5, 2000);
        let out_of_line = tampered(&history, |copy, index| {
            for event in &mut copy.events {
                if let What::Survey { line, .. } = &mut event.what
                    && line.len() >= 2
                    && line.iter().all(|shown| index.claims.contains_key(shown.claim.as_str()))
                {
                    line.swap(0, 1);
                    return true;
                }
            }
            false
        });
        prop_assume!(out_of_line.is_some());
        prop_assert!(refused(I::Fifo, &out_of_line.unwrap()));
    }

    #[test]
    fn an_answer_left_out_is_refused(seed: u64, pick: prop::sample::Index) {
        let history = history(seed, 4, 1000);
        let hanging = tampered(&history, |copy, index| {
            let last: Vec<_> = index.attempts.iter().filter(|attempt| {
                // Only the last operation of a client, so that the rest stays consistent.
                let alive = !index.kills.contains_key(attempt.client);
                let later = index.attempts.iter().any(|o| o.client == attempt.client && o.called > attempt.called);
                alive && !later && attempt.returned.is_some()
            }).collect();
            if last.is_empty() {
                return false;
            }
            let attempt = last[pick.index(last.len())];
            let (client, returned) = (attempt.client.to_owned(), attempt.returned.unwrap());
            let mut at = 0;
            copy.events.retain(|event| {
                at += 1;
                event.client != client || at <= returned || matches!(event.what, What::PauseBegin | What::PauseEnd)
            });
            true
        });
        prop_assume!(hanging.is_some());
        prop_assert!(refused(I::Progress, &hanging.unwrap()));
    }
}
