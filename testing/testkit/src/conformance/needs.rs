//! What a case requires of an engine, as functions that the lists of cases refer to.

use palisade::engine::{Ask, Permits, Tokens};

use super::{Fixture, permits};

/// Whether a case applies to an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// It applies.
    Met,
    /// It does not apply.
    Missing {
        /// The reason.
        reason: String,
        /// The request that the engine must refuse as unsupported, if there is one.
        refused: Option<Ask>,
    },
}

/// Generates the functions: the condition, the reason, and what must be refused otherwise; and
/// conjunctions of two.
macro_rules! needs {
    (
        one($fx:ident) { $($name:ident = $met:expr, $reason:literal $(, $refused:expr)?;)* }
        both { $($both:ident = $first:ident, $second:ident;)* }
    ) => {
        $(pub(super) fn $name($fx: &Fixture) -> Need {
            if $met {
                return Need::Met;
            }
            let refused = [$($refused)?].into_iter().next();
            Need::Missing { reason: $reason.to_owned(), refused }
        })*

        $(pub(super) fn $both(fx: &Fixture) -> Need {
            match $first(fx) {
                Need::Met => $second(fx),
                missing => missing,
            }
        })*
    };
}

needs! {
    one(fx) {
        shared = fx.capability().shared, "no read lock", Ask::READ;
        any_permits = fx.capability().permits != Permits::None, "no permits", permits(1, 2);
        weighted = fx.capability().permits == Permits::Weighted, "permits one by one", permits(2, 3);
        resize = fx.capability().resize, "permits can't be resized";
        ordered = fx.capability().fair, "waiters have no order";
        visible = fx.capability().waiters_visible, "waiters are not visible";
        tokens = fx.capability().tokens != Tokens::None, "no tokens";
        early_loss = fx.capability().early_loss, "no early loss signal";
        outage = fx.site().cut_off.is_some(), "nothing that could be cut off";
        remote = fx.url().contains("://"), "no network in between";
        era = !fx.url().starts_with("http"), "the gateway has the era";
        reached = !["+sentinel:", "+cluster:", "http:"].iter().any(|way| fx.url().contains(way)),
            "its servers are named by others, past any proxy";
        lives_on = fx.site().notices_death.is_none(), "a hold ends with its connection";
        processes = fx.site().processes, "lives in one process";
    }
    both {
        era_of_tokens = tokens, era;
        resize_weighted = resize, weighted;
        resize_shared = resize, shared;
        shared_and_permits = shared, any_permits;
        fair = ordered, visible;
        fair_shared = shared, fair;
        fair_weighted = weighted, fair;
        reached_on = reached, lives_on;
        network = remote, reached_on;
        fair_processes = processes, fair;
        shared_processes = shared, processes;
        permits_processes = any_permits, processes;
    }
}
