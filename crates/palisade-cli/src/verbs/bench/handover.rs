//! Hand-over: several waiters take one lock in turns, and record each grant and release.
//!
//! The waiters are tasks with a connection each, or processes: this command again, which takes
//! turns for each line `until` on its stdin and answers with the times and a dot. In a true pass,
//! a waiter that has released does not ask again until another has the lock. The *board* tells it:
//! a file of eight bytes with the time of the last grant, the same for tasks and processes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use palisade::BootTime;
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::Plan;
use super::figure::Round;
use super::side::{Cleanup, Side, Who, stuck};
use crate::exit::{Failure, Outcome, Verdict, refused};
use crate::worker::{Worker, tie_to_parent};

/// How long each holds in a true pass: long enough for all others to be asleep in the line.
const HOLD: Duration = Duration::from_millis(10);

/// The interval for polling the board: far below the time that the next waiter holds.
const LOOK: Duration = Duration::from_millis(1);

/// A waiter that does not end by itself is killed.
const FAREWELL: Duration = Duration::from_secs(2);

/// The waiters.
pub(super) struct Waiters {
    them: Them,
    pass: bool,
    name: String,
    dir: TempDir,
}

enum Them {
    Tasks(Vec<Side>),
    Processes(Vec<Worker>),
}

impl Waiters {
    pub(super) async fn gather(
        plan: &Plan<'_>,
        who: Who,
        name: &str,
        count: u16,
        pass: bool,
    ) -> Result<Self, Failure> {
        let dir = tempfile::tempdir().map_err(refused("can't make a temporary folder"))?;
        let board = dir.path().join("board");
        std::fs::write(&board, [0; 8]).map_err(refused("can't write to the temporary folder"))?;
        let open = || Side::open(plan.url, who, plan.cleanup);
        plan.cleanup.baton(open().await?, name).await?;
        let them = if plan.processes {
            let board = if pass { board } else { PathBuf::new() };
            let told = format!("{},{name},{}", who.word(), board.display());
            let start = |_| Worker::start(&["bench", "--waiter-of", &told], plan.url);
            let mut workers = (0..count).map(start).collect::<Result<Vec<_>, _>>()?;
            for worker in &mut workers {
                answer(worker).await?;
            }
            Them::Processes(workers)
        } else {
            let mut sides = Vec::new();
            for _ in 0..count {
                sides.push(open().await?);
            }
            Them::Tasks(sides)
        };
        let name = name.to_owned();
        Ok(Self {
            them,
            pass,
            name,
            dir,
        })
    }

    pub(super) async fn round(&mut self, slice: Duration) -> Result<Round, Failure> {
        let until = BootTime::now() + slice;
        let mut all = Vec::new();
        match &mut self.them {
            Them::Tasks(sides) => {
                let board = self.dir.path().join("board");
                let board = Arc::new(self.pass.then(|| Board::open(&board)).transpose()?);
                let mut tasks = JoinSet::new();
                for side in sides {
                    let (side, name, board) = (side.clone(), self.name.clone(), Arc::clone(&board));
                    tasks.spawn(
                        async move { take_turns(&side, &name, (*board).as_ref(), until).await },
                    );
                }
                while let Some(turns) = tasks.join_next().await {
                    all.push(turns.map_err(|error| refused("a task ended")(error.into()))??);
                }
            }
            Them::Processes(workers) => {
                for worker in workers.iter_mut() {
                    worker.tell(&until.as_nanos().to_string()).await?;
                }
                for worker in workers {
                    all.push(answer(worker).await?);
                }
            }
        }
        Ok(round(all, self.pass, until))
    }

    pub(super) async fn end(self) {
        if let Them::Processes(workers) = self.them {
            for worker in workers {
                worker.end(FAREWELL).await;
            }
        }
    }
}

/// The turns of a process in this round; none when it reports that it is ready.
async fn answer(worker: &mut Worker) -> Result<Vec<Turn>, Failure> {
    let mut turns = Vec::new();
    while let Some(line) = worker.line().await {
        if line == "." {
            return Ok(turns);
        }
        let turn = line.split_once(' ').and_then(|(granted, released)| {
            let granted = granted.parse().ok()?;
            let released = released.parse().ok()?;
            Some(Turn { granted, released })
        });
        turns.extend(turn);
    }
    Err(stuck(
        "a waiter ended in the middle of a measurement, or got no turn for a minute",
    ))
}

/// What a waiter that is a process does.
pub(super) async fn serve(url: &str, told: &str) -> Verdict {
    tie_to_parent()?;
    let wrong = || Failure::Usage("--waiter-of is for palisade itself".into());
    let mut parts = told.splitn(3, ',');
    let who = match parts.next() {
        Some("palisade") => Who::Palisade,
        Some("raw") => Who::Raw,
        _ => return Err(wrong()),
    };
    let (name, board) = parts.next().zip(parts.next()).ok_or_else(wrong)?;
    let cleanup = Cleanup::default();
    let side = Side::open(url, who, &cleanup).await?;
    let board = Some(Path::new(board)).filter(|board| *board != Path::new(""));
    let board = board.map(Board::open).transpose()?;
    println!(".");
    while let Some(until) = next_round().await {
        let turns = take_turns(&side, name, board.as_ref(), until).await?;
        let lines = turns
            .iter()
            .map(|turn| format!("{} {}\n", turn.granted, turn.released));
        println!("{}.", lines.collect::<String>());
    }
    drop(side);
    cleanup.run().await;
    Ok(Outcome::Done)
}

/// When the next round ends. Read on a thread, so that connections are served meanwhile.
async fn next_round() -> Option<BootTime> {
    let line = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        io::stdin().read_line(&mut line).ok().map(|_| line)
    });
    let line = line.await.ok().flatten()?;
    line.trim().parse().ok().map(BootTime::from_nanos)
}

/// When the lock was granted and released, in nanoseconds of the boot-time clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    granted: u64,
    released: u64,
}

/// Shows a waiter that has released that another has the lock.
struct Board(File);

impl Board {
    fn open(path: &Path) -> Result<Self, Failure> {
        let file = File::options().read(true).write(true).open(path);
        file.map(Self)
            .map_err(refused("can't open the board of the waiters"))
    }

    async fn other_than(&self, mine: u64, until: BootTime) -> io::Result<()> {
        let mut last = [0; 8];
        while !until.has_passed() {
            tokio::time::sleep(LOOK).await;
            self.0.read_exact_at(&mut last, 0)?;
            if u64::from_le_bytes(last) != mine {
                break;
            }
        }
        Ok(())
    }
}

/// Takes turns until then, and once more, so that no other waiter waits for one that has left.
async fn take_turns(
    side: &Side,
    name: &str,
    board: Option<&Board>,
    until: BootTime,
) -> Result<Vec<Turn>, Failure> {
    let unseen = refused("can't use the board of the waiters");
    let mut turns = Vec::new();
    loop {
        let taken = side.take(name).await?;
        let granted = BootTime::now().as_nanos();
        if let Some(Board(file)) = board {
            file.write_all_at(&granted.to_le_bytes(), 0)
                .map_err(&unseen)?;
            // A turn after the end does not count, so it is short.
            if !until.has_passed() {
                tokio::time::sleep(HOLD).await;
            }
        }
        let released = BootTime::now().as_nanos();
        taken.give().await?;
        turns.push(Turn { granted, released });
        if until.has_passed() {
            return Ok(turns);
        }
        match board {
            Some(board) => board.other_than(granted, until).await.map_err(&unseen)?,
            None => tokio::task::yield_now().await,
        }
    }
}

/// The times of all turns: from grant to grant, or, in a true pass, from the release of one waiter
/// to the grant of another.
fn round(all: Vec<Vec<Turn>>, pass: bool, until: BootTime) -> Round {
    let turns = all.into_iter().enumerate();
    let mut turns: Vec<(Turn, usize)> = turns
        .flat_map(|(who, turns)| turns.into_iter().map(move |turn| (turn, who)))
        .filter(|(turn, _)| turn.granted <= until.as_nanos())
        .collect();
    turns.sort_unstable();
    let (Some((first, _)), Some((last, _))) = (turns.first(), turns.last()) else {
        return Round::default();
    };
    let took = Duration::from_nanos(last.granted - first.granted);
    let times = turns.windows(2).filter_map(|pair| {
        let ((before, giver), (after, taker)) = (pair[0], pair[1]);
        if pass {
            (giver != taker).then(|| after.granted.saturating_sub(before.released))
        } else {
            Some(after.granted - before.granted)
        }
    });
    let times = times.collect();
    Round { times, took }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_from_release_to_the_grant_of_another() {
        let turn = |(granted, released)| Turn { granted, released };
        let one: Vec<_> = [(0, 10), (30, 40), (42, 50)].map(turn).into();
        let two: Vec<_> = [(13, 20), (90, 99)].map(turn).into();
        let until = BootTime::from_nanos(80);
        let pass = round(vec![one.clone(), two.clone()], true, until);
        assert_eq!(
            pass.times,
            [3, 10],
            "30 to 42 was no hand-over, 90 came too late"
        );
        assert_eq!(pass.took, Duration::from_nanos(42));
        assert_eq!(round(vec![one, two], false, until).times, [13, 17, 12]);
        assert!(round(vec![Vec::new()], true, until).times.is_empty());
    }
}
