//! `palisade fence`: compares fencing tokens with the highest one that was accepted.
//!
//! The engine keeps the fence next to its locks: the highest token of each name. It is for scripts
//! whose storage can't compare tokens itself, and narrows the window of a stale writer; only
//! storage that compares the token in the same step as its write closes it.

use palisade::fence::{Fence as Storage, Verdict as Judgement, WriteToken};
use palisade::{Name, Token};
use serde::Serialize;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
use crate::view::shown;

/// Compare a fencing token with the highest one accepted
#[derive(Debug, clap::Args)]
#[command(
    arg_required_else_help = true,
    subcommand_required = true,
    after_help = "Example:\n  palisade fence check stock 1794780881520131 --accept"
)]
pub(crate) struct Fence {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Check(Check),
}

/// Compare a token: exit code 0 if none newer was accepted, 1 if it is stale
///
/// The engine remembers the highest token of each name: in the directory of the embedded store, or
/// in Redis, etcd, ZooKeeper or PostgreSQL. With an engine that remembers none, the storage itself
/// must compare tokens.
///
/// A check that is separate from the write is advisory: the process can be paused between the two,
/// while a newer holder writes. Only storage that compares the token in the same step as its write
/// is safe. If the write depends on what is read, check with --accept before the read.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    palisade run stock -- sh -c 'palisade fence check stock $PALISADE_TOKEN --accept && ./write'\n  \
    palisade fence check stock 1794780881520131 --json")]
struct Check {
    /// The name of the protected resource, usually that of its lock
    name: String,
    /// The fencing token, as in PALISADE_TOKEN
    #[arg(value_parser = parse_token)]
    token: WriteToken,
    /// Remember the token, so that older ones are stale from now on
    #[arg(long)]
    accept: bool,
}

/// The answer; its field names are the command's contract.
#[derive(Serialize)]
struct Answer {
    name: String,
    token: String,
    verdict: &'static str,
    /// The highest token accepted, this one included if it was.
    highest: Option<String>,
    /// Whether the token is remembered now.
    accepted: bool,
}

impl Fence {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        let What::Check(check) = self.what;
        check.run(global).await
    }
}

impl Check {
    async fn run(self, global: &Global) -> Verdict {
        let name = Name::new(&self.name)?;
        let target = Target::find(global)?;
        let fence = palisade::fence::open(target.url()).await?;
        let (stale, highest) = self.judge(&*fence, &name).await?;
        let answer = Answer {
            name: self.name,
            token: self.token.to_string(),
            verdict: if stale { "stale" } else { "current" },
            highest: highest.map(|highest| highest.to_string()),
            accepted: self.accept && !stale,
        };
        global.printer().answer(&answer, Answer::text)?;
        Ok(if stale { Outcome::No } else { Outcome::Done })
    }

    /// Whether the token is stale, and the highest that was accepted.
    async fn judge(
        &self,
        fence: &dyn Storage,
        name: &Name,
    ) -> Result<(bool, Option<Token>), Failure> {
        if !self.accept {
            let highest = fence.highest(name).await?;
            let verdict = fence.rule().judge(highest, self.token);
            return Ok((verdict != Judgement::Accepted, highest));
        }
        Ok(match fence.accept(name, self.token).await? {
            Judgement::Accepted => (false, Some(self.token.token())),
            Judgement::Stale { highest } => (true, Some(highest)),
        })
    }
}

impl Answer {
    fn text(&self) -> String {
        let (name, token) = (shown(&self.name), &self.token);
        match (self.verdict, &self.highest) {
            ("stale", Some(highest)) => {
                format!("stale: {name} has accepted {highest}, which is newer than {token}\n")
            }
            _ if self.accepted => format!("accepted: {token} is the newest token of {name}\n"),
            (_, Some(highest)) => {
                format!("current: {name} has accepted none newer than {token} ({highest})\n")
            }
            _ => format!("current: {name} has accepted no token yet\n"),
        }
    }
}

fn parse_token(text: &str) -> Result<WriteToken, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let token = text.parse::<u64>().ok().filter(|_| digits);
    let token = token
        .map(WriteToken::from)
        .filter(|token| token.stored().is_ok());
    token.ok_or_else(|| "a token is a whole number above 0, as in PALISADE_TOKEN".to_owned())
}
