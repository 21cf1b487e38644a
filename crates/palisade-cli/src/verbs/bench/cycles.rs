//! Lock and unlock on one client: one name after the other, or many names at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::figure::Round;
use super::lane::{Door, Lane};
use super::refused;
use crate::exit::Failure;

/// Names on one client: a name for each that cycles at the same time.
pub(super) struct Cycles {
    doors: Arc<[Door]>,
}

impl Cycles {
    pub(super) fn new(lane: &Lane, name: &str, at_once: u16) -> Result<Self, Failure> {
        let doors = (0..at_once).map(|at| lane.door(&format!("{name}-{at}")));
        let doors = doors.collect::<Result<_, _>>()?;
        Ok(Self { doors })
    }

    pub(super) async fn round(&self, slice: Duration) -> Result<Round, Failure> {
        let began = Instant::now();
        let mut times = Vec::new();
        if let [door] = &*self.doors {
            cycle(door, began + slice, &mut times).await?;
        } else {
            let mut all = JoinSet::new();
            for at in 0..self.doors.len() {
                let doors = Arc::clone(&self.doors);
                all.spawn(async move {
                    let mut times = Vec::new();
                    cycle(&doors[at], began + slice, &mut times).await?;
                    Ok::<_, Failure>(times)
                });
            }
            while let Some(one) = all.join_next().await {
                times.extend(one.map_err(|error| refused("a task ended")(error.into()))??);
            }
        }
        let took = began.elapsed();
        Ok(Round { times, took })
    }
}

async fn cycle(door: &Door, until: Instant, times: &mut Vec<u64>) -> Result<(), Failure> {
    let mut begin = Instant::now();
    while begin < until {
        door.cycle().await?;
        let end = Instant::now();
        times.push((end - begin).as_nanos() as u64);
        begin = end;
        // What never waits would never let the others run.
        tokio::task::coop::consume_budget().await;
    }
    Ok(())
}
