//! The workloads of a worker.
//!
//! Validity is checked where a careful program would check it, and not again before a write: what
//! happens in between is left to the fence. A workload continues after a loss, like a program that
//! was stopped and has not checked yet.

use std::time::Duration;

use palisade::engine::READERS;
use palisade::fence::{Fence, Taken, Verdict};
use palisade::{Client, Elected, Hold, Outcome, Patience, Result, Token};
use rand::RngExt;
use rand::rngs::StdRng;

use super::Workload;
use super::store::{Fenced, entry, unfenced};
use super::watch::{Leading, dropped_after, guarded, id, known, look};
use super::worker::{Control, Spec, say};
use crate::lab::history::{Answer, Grip, Kept, Recorder, Released, What, Written};

/// The permits of the semaphore.
const PERMITS: u32 = 4;

/// One worker.
pub(super) struct Worker {
    pub(super) rng: StdRng,
    pub(super) control: Control,
    pub(super) record: Recorder,
    pub(super) client: Client,
    pub(super) workload: Workload,
    pub(super) spec: Spec,
    pub(super) op: u64,
}

/// A lock or a leadership.
enum Grasp {
    Lock(Hold),
    Lead(Elected),
}

impl Grasp {
    fn hold(&self) -> &Hold {
        match self {
            Self::Lock(hold) => hold,
            Self::Lead(elected) => elected.hold(),
        }
    }

    async fn release(self) -> Result<()> {
        match self {
            Self::Lock(hold) => hold.release().await,
            Self::Lead(elected) => elected.resign().await,
        }
    }
}

impl Worker {
    /// Works until told to stop.
    pub(super) async fn run(&mut self) -> Result<()> {
        while !self.control.stops() {
            if self.workload == Workload::FencedRegister && self.rng.random_bool(0.3) {
                self.read(&Fenced::open(&self.spec.store)?).await;
            } else {
                self.turn().await?;
            }
            // Leaves the line for a moment, except in the workload that checks the order.
            if self.workload != Workload::QueueOrder {
                self.sleep(0, 4000).await;
            }
        }
        Ok(())
    }

    /// Acquires, works, releases.
    async fn turn(&mut self) -> Result<()> {
        let grip = match self.workload {
            Workload::RwLock if self.rng.random_bool(0.7) => Grip::Part {
                weight: 1,
                capacity: READERS,
            },
            Workload::Semaphore => Grip::Part {
                weight: match self.client.capability().permits {
                    palisade::engine::Permits::Weighted => self.rng.random_range(1..PERMITS),
                    _ => 1,
                },
                capacity: PERMITS,
            },
            _ => Grip::Whole,
        };
        let Some(grasp) = self.acquire(grip).await? else {
            return Ok(());
        };
        let record = self.record.clone();
        guarded(&record, grasp.hold(), self.body(grasp.hold())).await?;
        look(&record, grasp.hold());
        let (token, claim) = id(grasp.hold());
        let valid_until = known(grasp.hold().deadline());
        record.record(What::ReleaseCalled {
            token,
            claim: claim.clone(),
            valid_until,
        });
        if self.spec.drops && self.rng.random_bool(0.5) {
            drop(grasp);
        } else {
            let answer = match grasp.release().await {
                Ok(()) => Released::Done,
                Err(error) if error.kind() == palisade::ErrorKind::Lost => Released::Lost,
                Err(error) => Released::Error {
                    kind: error.kind().code().to_owned(),
                },
            };
            record.record(What::ReleaseReturned {
                token,
                claim,
                answer,
            });
        }
        say("free");
        Ok(())
    }

    async fn acquire(&mut self, grip: Grip) -> Result<Option<Grasp>> {
        let op = self.next_op();
        let patience = match self.rng.random_range(0..10) {
            _ if self.workload == Workload::QueueOrder => Patience::For(Duration::from_secs(20)),
            0 => Patience::NoWait,
            1 => Patience::For(Duration::from_millis(20)),
            _ => Patience::For(Duration::from_secs(20)),
        };
        let drop_after = (self.spec.drops && self.rng.random_bool(0.5))
            .then(|| (self.rng.random_range(1..5), self.micros(0, 4000)));
        let patience_ms = match patience {
            Patience::NoWait => Some(0),
            Patience::For(wait) => u64::try_from(wait.as_millis()).ok(),
            Patience::Forever => None,
        };
        let ttl = Duration::from_millis(self.spec.ttl_ms);
        let (client, name) = (&self.client, &self.spec.name);
        let (election, request) = match self.workload {
            Workload::Election => (Some(client.election(name).ttl(ttl)), None),
            _ => (None, Some(client.line(name, grip.into()).ttl(ttl))),
        };
        let value = self.spec.client.clone();
        self.record.record(What::AcquireCalled {
            op,
            grip,
            patience_ms,
        });
        say("waiting");
        let acquire = async {
            Ok(match (&election, &request, patience) {
                (Some(election), _, Patience::For(wait)) => {
                    let elected = election.campaign_timeout(value, wait).await?;
                    elected.map(Grasp::Lead)
                }
                (Some(election), ..) => election.try_campaign(value).await?.map(Grasp::Lead),
                (None, Some(request), patience) => {
                    request.acquire(patience).await?.map(Grasp::Lock)
                }
                (None, None, _) => None,
            })
        };
        let acquired: Option<Result<Option<Grasp>>> = match drop_after {
            None => Some(acquire.await),
            Some((polls, limit)) => dropped_after(polls, limit, acquire).await,
        };
        let (answer, grasp) = match acquired {
            None => (Answer::Cancelled, None),
            Some(Ok(None)) => (Answer::Busy, None),
            Some(Ok(Some(grasp))) => {
                let (token, claim) = id(grasp.hold());
                (Answer::Held { token, claim }, Some(grasp))
            }
            Some(Err(error)) => {
                let answer = Answer::Error {
                    kind: error.kind().code().to_owned(),
                    maybe_applied: error.outcome() == Outcome::MaybeApplied,
                };
                (answer, None)
            }
        };
        self.record.record(What::AcquireReturned { op, answer });
        // The control reports that it holds only when a pause would do harm.
        let dangerous = self.workload == Workload::UnfencedCounter;
        match grasp {
            Some(_) if dangerous => {}
            Some(_) => say("held"),
            None => say("free"),
        }
        Ok(grasp)
    }

    async fn body(&mut self, hold: &Hold) -> Result<()> {
        match self.workload {
            Workload::Mutex | Workload::RwLock | Workload::Semaphore => {
                for _ in 0..self.rng.random_range(1..4) {
                    self.is_valid(hold);
                    self.sleep(0, 3000).await;
                }
                self.control.gate().await;
                self.is_valid(hold);
            }
            Workload::QueueOrder => {
                self.is_valid(hold);
                self.sleep(2000, 8000).await;
                self.control.gate().await;
            }
            Workload::Election => {
                let (record, token) = (self.record.clone(), hold.token().0);
                let (pause, control) = (self.micros(1000, 8000), self.control.clone());
                let lead = async {
                    let _leading = Leading::begin(record, token);
                    tokio::time::sleep(pause).await;
                    control.gate().await;
                };
                // If it was lost, the work was dropped, which is recorded.
                let _ = hold.run(lead).await;
            }
            Workload::FencedCounter => {
                let store = Fenced::open(&self.spec.store)?;
                // Raised before it is read: what an older holder still writes is refused, and is
                // not overwritten.
                let token = hold.token().into();
                let Ok(Taken::Accepted { data: chain }) =
                    store.fence.take(&store.resource, token).await
                else {
                    // Without the old content nothing can be added.
                    return Ok(());
                };
                self.sleep(1000, 4000).await;
                if self.is_valid(hold) {
                    self.control.gate().await;
                    let op = self.next_op();
                    let entry = entry(hold.token(), &self.spec.client, op);
                    let data = [chain.unwrap_or_default(), entry.clone().into_bytes()].concat();
                    self.write(&store, (op, hold.token()), entry, data).await;
                }
            }
            Workload::FencedRegister => {
                let store = Fenced::open(&self.spec.store)?;
                self.read(&store).await;
                if self.is_valid(hold) {
                    self.control.gate().await;
                    let op = self.next_op();
                    let value = format!("{}:{op}", self.spec.client);
                    let data = value.clone().into_bytes();
                    self.write(&store, (op, hold.token()), value, data).await;
                }
            }
            Workload::UnfencedCounter => self.unfenced(hold).await,
        }
        Ok(())
    }

    /// The control: it checks the lock, reads, and writes a while later.
    async fn unfenced(&mut self, hold: &Hold) {
        if !self.is_valid(hold) {
            return;
        }
        let path = unfenced(&self.spec.store);
        let chain = std::fs::read_to_string(&path).unwrap_or_default();
        say("held");
        self.sleep(8000, 15_000).await;
        self.control.gate().await;
        let op = self.next_op();
        let entry = entry(hold.token(), &self.spec.client, op);
        self.record.record(What::WriteCalled {
            op,
            token: hold.token().0,
            value: entry.clone(),
        });
        let temporary = path.with_extension(&self.spec.client);
        let written = std::fs::write(&temporary, chain + &entry)
            .and_then(|()| std::fs::rename(&temporary, &path));
        let answer = match written {
            Ok(()) => Written::Accepted,
            Err(_) => Written::Unknown,
        };
        self.record.record(What::WriteReturned { op, answer });
        say("wrote");
    }

    async fn write(
        &mut self,
        store: &Fenced,
        (op, token): (u64, Token),
        value: String,
        data: Vec<u8>,
    ) {
        self.record.record(What::WriteCalled {
            op,
            token: token.0,
            value,
        });
        let answer = match store.fence.write(&store.resource, token.into(), data).await {
            Ok(Verdict::Accepted) => Written::Accepted,
            Ok(Verdict::Stale { highest }) => Written::Stale { highest: highest.0 },
            Err(error) if error.outcome() == Outcome::NotApplied => Written::NotApplied,
            Err(_) => Written::Unknown,
        };
        let accepted = answer == Written::Accepted;
        self.record.record(What::WriteReturned { op, answer });
        if accepted {
            say("wrote");
        }
    }

    async fn read(&mut self, store: &Fenced) {
        let op = self.next_op();
        self.record.record(What::ReadCalled { op });
        // A failed read has seen nothing and proves nothing.
        if let Ok(kept) = store.fence.read(&store.resource).await {
            let answer = kept.map(|kept| Kept {
                token: kept.token.0,
                value: String::from_utf8_lossy(&kept.data).into_owned(),
            });
            self.record.record(What::ReadReturned { op, answer });
        }
    }

    /// Checks the lock, and records the answer with the time before the check.
    fn is_valid(&self, hold: &Hold) -> bool {
        look(&self.record, hold)
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    fn micros(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.rng.random_range(from..to))
    }

    async fn sleep(&mut self, from: u64, to: u64) {
        let pause = self.micros(from, to);
        tokio::time::sleep(pause).await;
    }
}
