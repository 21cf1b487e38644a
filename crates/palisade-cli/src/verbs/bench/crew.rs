//! `Crew`: the waiters of a hand-over, as tasks with a connection each or as processes.
//!
//! A waiter that is a process is this command again. It connects, says `ready`, and then for
//! each line `until` on its stdin takes its turns until then and answers with them and a dot;
//! when its stdin ends, so does it. The URL, which may hold a secret, is in its environment.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use palisade::BootTime;
use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;

use super::course::Plan;
use super::figure::{Round, Who};
use super::lane::Lane;
use super::relay::{self, Board, Turn, take_turns};
use super::traces::Traces;
use super::{refused, stuck};
use crate::exit::{Failure, Outcome, Verdict};

/// Beyond the end of a round, before a waiter that says nothing is given up.
const LONGEST: Duration = Duration::from_secs(60);

/// A waiter that does not end by itself is killed.
const FAREWELL: Duration = Duration::from_secs(2);

/// Those who take one name from each other.
pub(super) struct Crew {
    waiters: Waiters,
    pass: bool,
    name: String,
    dir: TempDir,
}

enum Waiters {
    Tasks(Vec<Lane>),
    Processes(Vec<Process>),
}

impl Crew {
    pub(super) async fn gather(
        plan: &Plan,
        who: Who,
        name: &str,
        count: u16,
        pass: bool,
    ) -> Result<Self, Failure> {
        let dir = tempfile::tempdir().map_err(refused("can't make a temporary folder"))?;
        std::fs::write(dir.path().join("board"), [0; 8])
            .map_err(refused("can't write to the temporary folder"))?;
        let first = Lane::open(&plan.url, who, &plan.traces).await?;
        plan.traces.lay(first.door(name)?).await?;
        let waiters = match plan.processes {
            false => {
                let mut lanes = Vec::new();
                for _ in 0..count {
                    lanes.push(Lane::open(&plan.url, who, &plan.traces).await?);
                }
                Waiters::Tasks(lanes)
            }
            true => {
                let told = match pass {
                    true => format!(
                        "{},{name},{}",
                        who.word(),
                        dir.path().join("board").display()
                    ),
                    false => format!("{},{name},", who.word()),
                };
                let start = |_| Process::start(&plan.url, &told);
                let mut processes = (0..count).map(start).collect::<Result<Vec<_>, _>>()?;
                for process in &mut processes {
                    process.answer().await?;
                }
                Waiters::Processes(processes)
            }
        };
        Ok(Self {
            waiters,
            pass,
            name: name.to_owned(),
            dir,
        })
    }

    pub(super) async fn round(&mut self, slice: Duration) -> Result<Round, Failure> {
        let until = BootTime::now() + slice;
        let all = match &mut self.waiters {
            Waiters::Tasks(lanes) => {
                let board = self.dir.path().join("board");
                let board = self.pass.then(|| Board::open(&board)).transpose()?;
                in_tasks(lanes, &self.name, board, until).await?
            }
            Waiters::Processes(processes) => {
                for process in processes.iter_mut() {
                    process.tell(&format!("{}\n", until.as_nanos())).await?;
                }
                let mut all = Vec::new();
                for process in processes {
                    all.push(process.answer().await?);
                }
                all
            }
        };
        Ok(relay::round(all, self.pass, until))
    }

    pub(super) async fn end(self) {
        if let Waiters::Processes(processes) = self.waiters {
            for process in processes {
                process.end().await;
            }
        }
    }
}

async fn in_tasks(
    lanes: &[Lane],
    name: &str,
    board: Option<Board>,
    until: BootTime,
) -> Result<Vec<Vec<Turn>>, Failure> {
    let board = Arc::new(board);
    let mut tasks = JoinSet::new();
    for lane in lanes {
        let (door, board) = (lane.door(name)?, Arc::clone(&board));
        tasks.spawn(async move { take_turns(&door, (*board).as_ref(), until).await });
    }
    let mut all = Vec::new();
    while let Some(turns) = tasks.join_next().await {
        all.push(turns.map_err(|error| refused("a task ended")(error.into()))??);
    }
    Ok(all)
}

/// A waiter that is a process.
struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(url: &str, told: &str) -> Result<Self, Failure> {
        let failed = refused("can't start a waiter");
        let mut child = Command::new("/proc/self/exe")
            .args(["bench", "--waiter-of", told])
            .env("PALISADE_URL", url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::Defect("a waiter without pipes".into()));
        };
        Ok(Self {
            child,
            stdin,
            lines: BufReader::new(stdout).lines(),
        })
    }

    async fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let told = self.stdin.write_all(line.as_bytes()).await;
        told.map_err(|_| gone())
    }

    /// Its turns of this round; none when it gets ready.
    async fn answer(&mut self) -> Result<Vec<Turn>, Failure> {
        let answer = async {
            let mut turns = Vec::new();
            while let Ok(Some(line)) = self.lines.next_line().await {
                if line == "." {
                    return Ok(turns);
                }
                let turn = line.split_once(' ').and_then(|(granted, released)| {
                    Some(Turn {
                        granted: granted.parse().ok()?,
                        released: released.parse().ok()?,
                    })
                });
                turns.push(turn.ok_or_else(gone)?);
            }
            Err(gone())
        };
        let answered = tokio::time::timeout(LONGEST, answer).await;
        answered.map_err(|_| stuck("a waiter got no turn for a minute"))?
    }

    async fn end(mut self) {
        drop(self.stdin);
        let _ = tokio::time::timeout(FAREWELL, self.child.wait()).await;
    }
}

fn gone() -> Failure {
    stuck("a waiter ended in the middle of a measurement")
}

/// What a waiter that is a process does.
pub(super) async fn serve(url: &str, told: &str) -> Verdict {
    // A round would go on without anyone who wants to know.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| refused("can't tie a waiter to the bench")(error.into()))?;
    let wrong = || Failure::Usage("--waiter-of is for palisade itself".into());
    let mut parts = told.splitn(3, ',');
    let (Some(who), Some(name), Some(board)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(wrong());
    };
    let who = match who {
        "palisade" => Who::Palisade,
        "raw" => Who::Raw,
        _ => return Err(wrong()),
    };
    let traces = Traces::default();
    let lane = Lane::open(url, who, &traces).await?;
    let door = lane.door(name)?;
    let board = Some(PathBuf::from(board)).filter(|board| board != Path::new(""));
    let board = board.map(|board| Board::open(&board)).transpose()?;
    println!(".");
    while let Some(until) = next_round().await {
        let mut answer = String::new();
        for turn in take_turns(&door, board.as_ref(), until).await? {
            answer.push_str(&format!("{} {}\n", turn.granted, turn.released));
        }
        let mut out = std::io::stdout().lock();
        std::io::Write::write_all(&mut out, format!("{answer}.\n").as_bytes())?;
    }
    drop((door, lane));
    traces.remove().await;
    Ok(Outcome::Done)
}

/// When the next round ends. Read on a thread: connections go on meanwhile.
async fn next_round() -> Option<BootTime> {
    let line = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).ok().map(|_| line)
    });
    let line = line.await.ok().flatten()?;
    line.trim().parse().ok().map(BootTime::from_nanos)
}
