//! What a case needs of an engine, as functions that the lists of cases name.

use palisade::core::capability::{Permits, Tokens};
use palisade::core::claim::Ask;

use super::{Bed, permits};

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
    match met {
        true => Need::Met,
        false => Need::Missing {
            reason: reason.to_owned(),
            refused,
        },
    }
}

fn all<const N: usize>(needs: [Need; N]) -> Need {
    let missing = needs.into_iter().find(|need| *need != Need::Met);
    missing.unwrap_or(Need::Met)
}

pub(super) fn shared(bed: &Bed) -> Need {
    need(bed.capability().shared, "no read lock", Some(Ask::READ))
}

pub(super) fn any_permits(bed: &Bed) -> Need {
    let met = bed.capability().permits != Permits::None;
    need(met, "no permits", Some(permits(1, 2)))
}

pub(super) fn weighted(bed: &Bed) -> Need {
    let met = bed.capability().permits == Permits::Weighted;
    need(met, "permits one by one", Some(permits(2, 3)))
}

pub(super) fn resize(bed: &Bed) -> Need {
    need(bed.capability().resize, "permits can't be resized", None)
}

pub(super) fn resize_weighted(bed: &Bed) -> Need {
    all([resize(bed), weighted(bed)])
}

pub(super) fn resize_shared(bed: &Bed) -> Need {
    all([resize(bed), shared(bed)])
}

pub(super) fn shared_and_permits(bed: &Bed) -> Need {
    all([shared(bed), any_permits(bed)])
}

pub(super) fn fair(bed: &Bed) -> Need {
    all([
        need(bed.capability().fair, "waiters have no order", None),
        visible(bed),
    ])
}

pub(super) fn fair_shared(bed: &Bed) -> Need {
    all([shared(bed), fair(bed)])
}

pub(super) fn fair_weighted(bed: &Bed) -> Need {
    all([weighted(bed), fair(bed)])
}

pub(super) fn visible(bed: &Bed) -> Need {
    let met = bed.capability().waiters_visible;
    need(met, "waiters are not visible", None)
}

pub(super) fn tokens(bed: &Bed) -> Need {
    let met = bed.capability().tokens != Tokens::None;
    need(met, "no tokens", None)
}

pub(super) fn early_loss(bed: &Bed) -> Need {
    let met = bed.capability().early_loss;
    need(met, "no early loss signal", None)
}

pub(super) fn outage(bed: &Bed) -> Need {
    let met = bed.site().outage.is_some();
    need(met, "nothing that could be cut off", None)
}

/// A server whose holds live on when their connection breaks.
pub(super) fn network(bed: &Bed) -> Need {
    all([
        need(bed.url().contains("://"), "no network in between", None),
        need(
            bed.site().notices_death.is_none(),
            "a hold ends with its connection",
            None,
        ),
    ])
}

pub(super) fn processes(bed: &Bed) -> Need {
    need(bed.site().processes, "lives in one process", None)
}

pub(super) fn fair_processes(bed: &Bed) -> Need {
    all([processes(bed), fair(bed)])
}

pub(super) fn shared_processes(bed: &Bed) -> Need {
    all([shared(bed), processes(bed)])
}

pub(super) fn permits_processes(bed: &Bed) -> Need {
    all([any_permits(bed), processes(bed)])
}
