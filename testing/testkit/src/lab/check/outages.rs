//! When the engine itself was out: it can't serve anyone then, nor right afterwards. And when a
//! server that was stopped continues, it may act on what it knew before.

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

/// A server that was stopped continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumption {
    /// How long it was stopped, in nanoseconds.
    pub stopped: u64,
    /// From just before it continues until the outage and its aftermath are over.
    pub window: Window,
}

/// The resumptions of the engine's servers.
pub(super) fn resumptions(history: &History) -> Vec<Resumption> {
    let stop = Fault::Engine(Outage::Stop).name();
    let (mut begun, mut all) = (None, Vec::<Resumption>::new());
    for event in &history.events {
        match &event.what {
            What::FaultBegin { fault } if fault == stop => begun = Some(event.at),
            What::FaultHeal { fault } if fault == stop => {
                let (from, until) = (event.at, u64::MAX);
                all.extend(begun.take().map(|begun| Resumption {
                    stopped: from - begun,
                    window: Window { from, until },
                }));
            }
            What::FaultEnd { fault } if fault == stop => {
                if let Some(last) = all.last_mut() {
                    let until = event.at.saturating_add(AFTERMATH);
                    last.window.until = last.window.until.min(until);
                }
            }
            _ => {}
        }
    }
    all
}
