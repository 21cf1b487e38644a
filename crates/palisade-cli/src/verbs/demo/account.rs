//! The account of the demo, in a plain file and in a fenced one, and a depositor's work on it.
//!
//! A depositor gets the lock, reads the account, prints `granted TOKEN`, and waits for `write`.
//! Then it writes the new balance, first to the plain file, then to the fenced one with its token,
//! and checks its hold only afterwards: a mistake that any program can make.

use std::io::Write;
use std::path::{Path, PathBuf};

use palisade::fence::{Fence, FileFence, Verdict as Judged};
use palisade::{ErrorKind, Name, Token};

use crate::exit::{Failure, Outcome, Verdict, refused};
use crate::worker::tie_to_parent;

pub(super) const LOCK: &str = "account";

/// Where it is kept.
pub(super) struct Account<'a>(pub(super) &'a Path);

impl Account<'_> {
    fn plain(&self) -> PathBuf {
        self.0.join("plain")
    }

    fn fence(&self) -> Result<FileFence, Failure> {
        Ok(FileFence::open(self.0.join("fenced"))?)
    }

    pub(super) async fn open(&self, balance: u64) -> Result<(), Failure> {
        self.write_plain(balance)?;
        self.write_fenced(Token(1), balance).await?;
        Ok(())
    }

    fn write_plain(&self, balance: u64) -> Result<(), Failure> {
        let written = std::fs::write(self.plain(), balance.to_string());
        written.map_err(refused("can't write the plain file"))
    }

    async fn write_fenced(&self, token: Token, balance: u64) -> Result<Judged, Failure> {
        let balance = balance.to_string().into_bytes();
        Ok(self
            .fence()?
            .write(&Name::new(LOCK)?, token.into(), balance)
            .await?)
    }

    /// The balance in the plain and in the fenced file.
    pub(super) async fn read(&self) -> Result<(Option<u64>, Option<u64>), Failure> {
        let plain = std::fs::read(self.plain()).map_err(refused("can't read the plain file"))?;
        let fenced = self.fence()?.read(&Name::new(LOCK)?).await?;
        let fenced = fenced.map(|fenced| fenced.data).unwrap_or_default();
        let number = |data: &[u8]| std::str::from_utf8(data).ok()?.trim().parse().ok();
        Ok((number(&plain), number(&fenced)))
    }
}

/// The work of a depositor that is started with `AMOUNT,DIR`.
pub(super) async fn deposit(told: &str) -> Verdict {
    tie_to_parent()?;
    let wrong = || Failure::Usage("--worker-of is for palisade itself".into());
    let (amount, dir) = told.split_once(',').ok_or_else(wrong)?;
    let amount: u64 = amount.parse().map_err(|_| wrong())?;
    let account = Account(Path::new(dir));
    let client = palisade::connect(&crate::config::url(None)?).await?;
    let hold = client.mutex(LOCK).lock().await?;
    let (Some(plain), Some(fenced)) = account.read().await? else {
        return Err(Failure::Defect("the account is damaged".into()));
    };
    say(&format!("granted {}", hold.token()))?;

    // Blocking is fine: the keeper has its own thread.
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line);
    read.map_err(refused("can't hear the demo"))?;
    if line.trim() != "write" {
        return Ok(Outcome::Done);
    }
    account.write_plain(plain + amount)?;
    say("plain")?;
    say(
        &match account.write_fenced(hold.token(), fenced + amount).await? {
            Judged::Accepted => "fenced accepted".to_owned(),
            Judged::Stale { highest } => format!("fenced stale: it has seen {highest}"),
        },
    )?;
    if !hold.is_valid() {
        say("valid false")?;
    }
    match hold.release().await {
        Err(error) if error.kind() != ErrorKind::Lost => Err(error.into()),
        _ => Ok(Outcome::Done),
    }
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
