//! What a case needs of an engine, as functions that the lists of cases name.

use palisade::engine::{Ask, Permits, Tokens};

use super::{Fixture, permits};

/// Whether an engine can be asked for a behaviour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// It can.
    Met,
    /// It can't.
    Missing {
        /// Why.
        reason: String,
        /// What it must refuse as unsupported, if it is something one can ask for.
        refused: Option<Ask>,
    },
}

fn need(met: bool, reason: &str, refused: Option<Ask>) -> Need {
    if met {
        return Need::Met;
    }
    Need::Missing {
        reason: reason.to_owned(),
        refused,
    }
}

fn all<const N: usize>(needs: [Need; N]) -> Need {
    let missing = needs.into_iter().find(|need| *need != Need::Met);
    missing.unwrap_or(Need::Met)
}

pub(super) fn shared(fx: &Fixture) -> Need {
    need(fx.capability().shared, "no read lock", Some(Ask::READ))
}

pub(super) fn any_permits(fx: &Fixture) -> Need {
    let met = fx.capability().permits != Permits::None;
    need(met, "no permits", Some(permits(1, 2)))
}

pub(super) fn weighted(fx: &Fixture) -> Need {
    let met = fx.capability().permits == Permits::Weighted;
    need(met, "permits one by one", Some(permits(2, 3)))
}

pub(super) fn resize(fx: &Fixture) -> Need {
    need(fx.capability().resize, "permits can't be resized", None)
}

pub(super) fn resize_weighted(fx: &Fixture) -> Need {
    all([resize(fx), weighted(fx)])
}

pub(super) fn resize_shared(fx: &Fixture) -> Need {
    all([resize(fx), shared(fx)])
}

pub(super) fn shared_and_permits(fx: &Fixture) -> Need {
    all([shared(fx), any_permits(fx)])
}

pub(super) fn fair(fx: &Fixture) -> Need {
    all([
        need(fx.capability().fair, "waiters have no order", None),
        visible(fx),
    ])
}

pub(super) fn fair_shared(fx: &Fixture) -> Need {
    all([shared(fx), fair(fx)])
}

pub(super) fn fair_weighted(fx: &Fixture) -> Need {
    all([weighted(fx), fair(fx)])
}

pub(super) fn visible(fx: &Fixture) -> Need {
    let met = fx.capability().waiters_visible;
    need(met, "waiters are not visible", None)
}

pub(super) fn tokens(fx: &Fixture) -> Need {
    let met = fx.capability().tokens != Tokens::None;
    need(met, "no tokens", None)
}

pub(super) fn early_loss(fx: &Fixture) -> Need {
    let met = fx.capability().early_loss;
    need(met, "no early loss signal", None)
}

pub(super) fn outage(fx: &Fixture) -> Need {
    let met = fx.site().cut_off.is_some();
    need(met, "nothing that could be cut off", None)
}

/// A server whose holds live on when their connection breaks.
pub(super) fn network(fx: &Fixture) -> Need {
    all([
        need(fx.url().contains("://"), "no network in between", None),
        need(
            !["+sentinel:", "+cluster:"]
                .iter()
                .any(|w| fx.url().contains(w)),
            "its servers are named by others, past any proxy",
            None,
        ),
        need(
            fx.site().notices_death.is_none(),
            "a hold ends with its connection",
            None,
        ),
    ])
}

pub(super) fn processes(fx: &Fixture) -> Need {
    need(fx.site().processes, "lives in one process", None)
}

pub(super) fn fair_processes(fx: &Fixture) -> Need {
    all([processes(fx), fair(fx)])
}

pub(super) fn shared_processes(fx: &Fixture) -> Need {
    all([shared(fx), processes(fx)])
}

pub(super) fn permits_processes(fx: &Fixture) -> Need {
    all([any_permits(fx), processes(fx)])
}
