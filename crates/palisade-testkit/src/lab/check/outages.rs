//! When the engine itself was out: it can't serve anyone then, nor right afterwards.

use super::index::Window;
use crate::engine::Outage;
use crate::lab::faults::Fault;
use crate::lab::history::{History, What};

/// How long an engine may take to serve everyone again after an outage: requests in flight end by
/// their own timeout (2 s), a leader is elected (up to 3 s), connections are restored.
const AFTERMATH: u64 = 4_000_000_000;

const OUTAGES: [Outage; 4] = [Outage::Stop, Outage::Kill, Outage::Cut, Outage::Blackhole];

/// The windows in which the engine can't be expected to serve.
pub(super) fn outages(history: &History) -> Vec<Window> {
    let mut windows = Vec::new();
    let mut begun = None;
    let hurts = |fault: &str| {
        OUTAGES
            .iter()
            .any(|outage| Fault::Engine(*outage).name() == fault)
    };
    for event in &history.events {
        match &event.what {
            What::FaultBegin { fault } if hurts(fault) => begun = Some(event.at),
            What::FaultEnd { fault } if hurts(fault) => {
                let from = begun.take().unwrap_or(event.at);
                let until = event.at.saturating_add(AFTERMATH);
                windows.push(Window { from, until });
            }
            _ => {}
        }
    }
    let open = begun.map(|from| Window {
        from,
        until: u64::MAX,
    });
    windows.extend(open);
    windows
}
