//! Workloads × faults: two tables, and what must hold in each cell.
//!
//! A workload is what every worker process does; a fault is what the harness does to the workers or
//! to the engine. [`cell`] says what applies: a cell that does not apply has a reason. The control,
//! a counter without a fence, **must** lose updates when its holder is stopped past the lease: this
//! proves that the run can detect them.

pub mod command;
mod crew;
pub mod experiment;
mod figures;
mod inject;
mod runner;
mod store;
mod watch;
mod work;
pub mod worker;

pub use figures::Figures;
pub use runner::{Report, Run, run};

use std::fmt;

use palisade::Capability;
use palisade::engine::{Permits, Tokens};

use crate::engine::{Outage, Site};
use crate::lab::check::Invariant;

/// What the workers do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Workload {
    /// Acquire an exclusive lock, check it, release it.
    Mutex,
    /// Take, add and write back through a fenced file.
    FencedCounter,
    /// Read and write a fenced file.
    FencedRegister,
    /// As the fenced counter, without a fence: the control.
    UnfencedCounter,
    /// Read or write locks.
    RwLock,
    /// Weighted permits.
    Semaphore,
    /// Campaign, work while leading, resign.
    Election,
    /// Many workers on one lock, whose line is surveyed often.
    QueueOrder,
}

impl Workload {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Mutex,
        Self::FencedCounter,
        Self::FencedRegister,
        Self::UnfencedCounter,
        Self::RwLock,
        Self::Semaphore,
        Self::Election,
        Self::QueueOrder,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mutex => "mutex",
            Self::FencedCounter => "fenced-counter",
            Self::FencedRegister => "fenced-register",
            Self::UnfencedCounter => "unfenced-counter",
            Self::RwLock => "rwlock",
            Self::Semaphore => "semaphore",
            Self::Election => "election",
            Self::QueueOrder => "queue-order",
        }
    }

    /// Whether it writes to a store.
    pub const fn writes(self) -> bool {
        matches!(
            self,
            Self::FencedCounter | Self::FencedRegister | Self::UnfencedCounter
        )
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What the harness does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// Nothing.
    None,
    /// Stops a holder past its lease, then continues it.
    PauseHolder,
    /// Stops a holder for a part of its lease.
    PauseShort,
    /// Kills a holder.
    KillHolder,
    /// Kills a waiter.
    KillWaiter,
    /// Stops a holder past its lease between its last check of the lock and its write.
    PauseBeforeWrite,
    /// Drops acquires at a random await, and holds without a release.
    DropFutures,
    /// Starves the workers of CPU time.
    Slow,
    /// Disturbs the engine.
    Engine(Outage),
}

impl Fault {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::None,
        Self::PauseHolder,
        Self::PauseShort,
        Self::KillHolder,
        Self::KillWaiter,
        Self::PauseBeforeWrite,
        Self::DropFutures,
        Self::Slow,
        Self::Engine(Outage::Stop),
        Self::Engine(Outage::Kill),
        Self::Engine(Outage::Cut),
        Self::Engine(Outage::Blackhole),
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::PauseHolder => "pause-holder",
            Self::PauseShort => "pause-short",
            Self::KillHolder => "kill-holder",
            Self::KillWaiter => "kill-waiter",
            Self::PauseBeforeWrite => "pause-before-write",
            Self::DropFutures => "drop-futures",
            Self::Slow => "slow",
            Self::Engine(Outage::Stop) => "engine-stop",
            Self::Engine(Outage::Kill) => "engine-kill",
            Self::Engine(Outage::Cut) => "cut",
            Self::Engine(Outage::Blackhole) => "blackhole",
        }
    }

    /// Whether it needs the machine for itself.
    pub const fn alone(self) -> bool {
        matches!(self, Self::Slow)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What applies to one workload under one fault on one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// It is run, and these invariants must hold.
    Checked(Vec<Invariant>),
    /// It is run, and updates must get lost.
    MustLose,
    /// It can't be run, for this reason.
    NotApplicable(String),
}

/// What applies on an engine at `site` with this capability.
pub fn cell(site: &Site, capability: &Capability, workload: Workload, fault: Fault) -> Cell {
    let not = |why: &str| Cell::NotApplicable(why.to_owned());
    if !site.processes {
        return not("it lives in one process: there is nobody to stop or kill beside it");
    }
    match workload {
        Workload::RwLock if !capability.shared => return not("no readers"),
        Workload::Semaphore if capability.permits == Permits::None => return not("no permits"),
        Workload::QueueOrder if !capability.fair => return not("not fair"),
        Workload::QueueOrder if !capability.waiters_visible => return not("waiters not visible"),
        Workload::FencedCounter | Workload::FencedRegister if capability.tokens == Tokens::None => {
            return not("no tokens");
        }
        _ => {}
    }
    match fault {
        Fault::PauseBeforeWrite if !workload.writes() => {
            return not("this workload writes nothing");
        }
        Fault::Engine(outage) if !site.outages.as_ref().is_some_and(|o| o.can(outage)) => {
            return not("no server that could be hurt so");
        }
        _ => {}
    }
    let past_the_lease = matches!(fault, Fault::PauseHolder | Fault::PauseBeforeWrite);
    if workload == Workload::UnfencedCounter && past_the_lease {
        return Cell::MustLose;
    }
    let mut checked = invariants(workload, fault);
    // A holder whose lease a resumed server revokes may write beside the next one: only a fence
    // keeps them apart.
    let revokes = site.takes_away && fault == Fault::Engine(Outage::Stop);
    if workload == Workload::UnfencedCounter && revokes {
        checked.retain(|invariant| *invariant != Invariant::NoLostUpdate);
    }
    Cell::Checked(checked)
}

fn invariants(workload: Workload, fault: Fault) -> Vec<Invariant> {
    use Invariant as I;
    let mut all = vec![
        I::BelievedExclusion,
        I::TokenOrder,
        I::Progress,
        I::EarlyLoss,
        I::NoForeignRelease,
        I::HonestUnknown,
    ];
    match workload {
        Workload::Mutex => {}
        Workload::FencedCounter => all.extend([I::FencedExclusion, I::NoLostUpdate]),
        Workload::FencedRegister => all.extend([I::FencedExclusion, I::Linearizable]),
        // A starved process may write after its lease, as a stopped one does.
        Workload::UnfencedCounter if fault == Fault::Slow => {}
        Workload::UnfencedCounter => all.push(I::NoLostUpdate),
        Workload::RwLock | Workload::Semaphore => all.push(I::Capacity),
        Workload::Election => all.push(I::Election),
        Workload::QueueOrder => all.push(I::Fifo),
    }
    match fault {
        Fault::KillHolder | Fault::PauseHolder | Fault::PauseBeforeWrite => {
            all.push(I::BoundedLeak);
        }
        Fault::DropFutures => all.push(I::CancelSafety),
        Fault::None | Fault::PauseShort | Fault::KillWaiter => all.push(I::NoSpuriousLoss),
        Fault::Slow | Fault::Engine(_) => {}
    }
    // A survey does not show how a stop affects the line of a semaphore or read-write lock.
    if matches!(workload, Workload::RwLock | Workload::Semaphore) && fault == Fault::PauseHolder {
        all.retain(|invariant| *invariant != I::BoundedLeak);
    }
    all.sort_unstable();
    all
}
