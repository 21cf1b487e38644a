//! Fenced znodes: one `multi` compares the mark's version, and writes the mark and the data.
//!
//! The mark of a resource is a znode with the highest token in 20 digits; its data is in another
//! znode (see `keys`). A write reads the mark, checks the token, and is applied only if the mark is
//! unchanged. ZooKeeper checks that atomically with the write, so a pause of the writer can't come
//! in between.

use std::sync::Arc;

use super::keys::Keys;
use super::proto::{Answer, Lives, Refused, Reply, Request, Stat, code};
use super::{Inner, config, error};
use palisade_core::engine::{Settings, Url};
use palisade_core::fence::{
    Fenced, Rule, SharedFence, Taken, Verdict, WriteToken, digits, read_digits,
};
use palisade_core::{Error, ErrorKind, Name, Result, Token};
use palisade_kit::cas::Retry;
use palisade_kit::fence_store::{FenceStore, Stored};

/// A server accepts packets of 1 MiB (`jute.maxbuffer`) and closes the connection of a client that
/// sends more. The paths of a write need some of it.
const MOST_DATA: usize = 1_000_000;

/// Opens the fenced storage of an ensemble.
///
/// # Errors
/// As opening the engine.
pub async fn open(url: Url, settings: &Settings, rule: Rule) -> Result<SharedFence> {
    let inner = config::open(url, settings).await?;
    Ok(Arc::new(Stored::new(ZooKeeperFence { inner, rule })))
}

struct ZooKeeperFence {
    inner: Inner,
    rule: Rule,
}

/// The znodes of a fenced resource.
struct Nodes {
    mark: String,
    data: String,
}

/// A mark as it was read.
struct Mark {
    highest: Token,
    stat: Stat,
}

impl ZooKeeperFence {
    fn nodes(&self, resource: &Name) -> Result<Nodes> {
        let (mark, data) = self.inner.keys.fenced(resource)?;
        Ok(Nodes { mark, data })
    }

    async fn call(&self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let session = self.inner.client.any().await?;
        let timeout = self.inner.client.timeout;
        let answers = session.call("fence", timeout, requests).await;
        answers.map_err(|error| match error.kind() {
            // Nothing of a fence depends on its session.
            ErrorKind::Lost => {
                Error::new(ErrorKind::Unreachable, "fence", error.message()).maybe_applied()
            }
            _ => error,
        })
    }

    /// Reads the mark as the leader has it, and what else is asked for.
    async fn read_nodes(
        &self,
        nodes: &Nodes,
        more: impl IntoIterator<Item = Request>,
    ) -> Result<(Option<Mark>, Vec<Answer>)> {
        let mark = [
            Request::Sync(nodes.mark.clone()),
            Request::Data(nodes.mark.clone(), false),
        ];
        let requests: Vec<Request> = mark.into_iter().chain(more).collect();
        let mut answers = self.inner.client.read("fence", &requests).await?;
        let rest = answers.split_off(2.min(answers.len()));
        let mark = present(answers.pop())?.map(|mark| {
            let highest = read_digits(&mark.data).ok_or_else(damaged)?;
            let stat = mark.stat;
            Ok(Mark { highest, stat })
        });
        Ok((mark.transpose()?, rest))
    }

    /// Writes a znode, provided that it is unchanged since it was read.
    fn put(&self, node: &str, seen: Option<Stat>, data: &[u8]) -> Request {
        match seen {
            Some(stat) => Request::SetData(node.to_owned(), data.to_vec(), stat.version),
            None => Request::Create {
                path: node.to_owned(),
                data: data.to_vec(),
                acl: self.inner.client.acl,
                lives: Lives::Persistent,
            },
        }
    }

    /// Creates the missing parents of a znode that does not exist.
    fn above(&self, node: &str, is_absent: bool) -> Vec<Request> {
        let above = node.rsplit_once('/').map_or("", |(above, _)| above);
        let nodes = Keys::parents(above).filter(|node| is_absent && !node.is_empty());
        nodes.map(|node| self.put(node, None, &[])).collect()
    }
}

impl ZooKeeperFence {
    /// Raises the mark to `number` and writes the data if the token is accepted. Then reads `more`
    /// in the same session, and answers with that.
    async fn raised(
        &self,
        nodes: &Nodes,
        token: WriteToken,
        number: i64,
        data: Option<&[u8]>,
        more: &[Request],
    ) -> Result<std::result::Result<Vec<Answer>, Token>> {
        let mut retry = Retry::many();
        loop {
            let look = data.map(|_| Request::Exists(nodes.data.clone()));
            let (mark, mut found) = self.read_nodes(nodes, look).await?;
            let highest = mark.as_ref().map(|mark| mark.highest);
            if let Verdict::Stale { highest } = self.rule.judge(highest, token) {
                return Ok(Err(highest));
            }
            let raised = Token(number.unsigned_abs());
            let mark = mark.map(|mark| (mark.highest == raised, mark.stat));
            let mut steps = vec![match mark {
                Some((true, stat)) => Request::Check(nodes.mark.clone(), stat.version),
                _ => {
                    let number = digits(number);
                    self.put(&nodes.mark, mark.map(|(_, stat)| stat), number.as_bytes())
                }
            }];
            let mut requests = self.above(&nodes.mark, mark.is_none());
            if let Some(data) = data {
                let seen = present(found.pop())?.map(|found| found.stat);
                steps.push(self.put(&nodes.data, seen, data));
                requests.extend(self.above(&nodes.data, seen.is_none()));
            }
            requests.push(Request::Multi(steps));
            let place = requests.len();
            requests.extend_from_slice(more);
            let mut answers = self.call(requests).await?;
            let found = answers.split_off(place.min(answers.len()));
            match answers.pop().ok_or_else(error::missing)? {
                Ok(_) => return Ok(Ok(found)),
                Err(refused) if is_conflict(refused) => {
                    let mut refused = answers.into_iter().filter_map(Answer::err);
                    if let Some(denied) = refused.find(|refused| refused.is(code::NO_AUTH)) {
                        return Err(error::refused("fence", denied));
                    }
                }
                Err(refused) => return Err(error::refused("fence", refused)),
            }
            retry.or_busy("fence").await?;
        }
    }
}

impl FenceStore for ZooKeeperFence {
    async fn judged(
        &self,
        resource: &Name,
        token: WriteToken,
        data: Option<Vec<u8>>,
    ) -> Result<Verdict> {
        let (number, nodes) = (token.stored()?, self.nodes(resource)?);
        if data.as_ref().is_some_and(|data| data.len() > MOST_DATA) {
            let message = format!("a node of ZooKeeper takes {MOST_DATA} bytes at the most");
            return Err(Error::new(ErrorKind::InvalidArgument, "fence", message));
        }
        let done = self.raised(&nodes, token, number, data.as_deref(), &[]);
        Ok(match done.await? {
            Ok(_) => Verdict::Accepted,
            Err(highest) => Verdict::Stale { highest },
        })
    }

    async fn take(&self, resource: &Name, token: WriteToken) -> Result<Taken> {
        let nodes = self.nodes(resource)?;
        let look = [
            Request::Data(nodes.data.clone(), false),
            Request::Data(nodes.mark.clone(), false),
        ];
        let mut retry = Retry::many();
        loop {
            let Some(number) = self.rule.mark_of_take(token)? else {
                // No older token exists, and there is nothing to raise.
                let (mark, mut found) = self.read_nodes(&nodes, look[..1].to_vec()).await?;
                let highest = mark.map(|mark| mark.highest);
                if let Verdict::Stale { highest } = self.rule.judge(highest, token) {
                    return Ok(Taken::Stale { highest });
                }
                let data = present(found.pop())?.map(|found| found.data);
                return Ok(Taken::Accepted { data });
            };
            // A multi can't read. What the same session reads after it contains all that was
            // accepted before it.
            let mut found = match self.raised(&nodes, token, number, None, &look).await? {
                Ok(found) => found,
                Err(highest) => return Ok(Taken::Stale { highest }),
            };
            let (mark, data) = (present(found.pop())?, present(found.pop())?);
            if let Some(mark) = mark {
                let highest = read_digits(&mark.data).ok_or_else(damaged)?;
                if highest > token.token() {
                    // A newer holder was quicker; the data may be its own.
                    return Ok(Taken::Stale { highest });
                }
                let data = data.map(|found| found.data);
                return Ok(Taken::Accepted { data });
            }
            // It was forgotten in between.
            retry.or_busy("fence").await?;
        }
    }

    async fn read(&self, resource: &Name) -> Result<Option<Fenced>> {
        let nodes = self.nodes(resource)?;
        let mut retry = Retry::many();
        loop {
            let more = [
                Request::Data(nodes.data.clone(), false),
                Request::Exists(nodes.mark.clone()),
            ];
            let (mark, mut found) = self.read_nodes(&nodes, more).await?;
            let Some(mark) = mark else { return Ok(None) };
            let (again, data) = (found.pop(), found.pop());
            // Two reads are a snapshot only if the mark is the same before and after.
            let is_same = |again: Reply| again.stat.modified == mark.stat.modified;
            if present(again)?.is_some_and(is_same) {
                let data = present(data)?.map(|found| found.data);
                return Ok(Some(Fenced {
                    token: mark.highest,
                    data: data.unwrap_or_default(),
                }));
            }
            retry.or_busy("fence").await?;
        }
    }

    async fn highest(&self, resource: &Name) -> Result<Option<Token>> {
        let (mark, _) = self.read_nodes(&self.nodes(resource)?, []).await?;
        Ok(mark.map(|mark| mark.highest))
    }

    async fn forget(&self, resource: &Name) -> Result<bool> {
        let nodes = self.nodes(resource)?;
        let mut retry = Retry::many();
        loop {
            let look = [Request::Exists(nodes.data.clone())];
            let (mark, mut found) = self.read_nodes(&nodes, look).await?;
            if mark.is_none() {
                return Ok(false);
            }
            let mut steps = vec![Request::Delete(nodes.mark.clone())];
            if present(found.pop())?.is_some() {
                steps.push(Request::Delete(nodes.data.clone()));
            }
            let mut answers = self.call(vec![Request::Multi(steps)]).await?;
            match answers.pop().ok_or_else(error::missing)? {
                Ok(_) => return Ok(true),
                Err(refused) if is_conflict(refused) => {}
                Err(refused) => return Err(error::refused("fence", refused)),
            }
            retry.or_busy("fence").await?;
        }
    }

    fn rule(&self) -> Rule {
        self.rule
    }
}

/// What was read of a znode; `None` when it does not exist.
fn present(read: Option<Answer>) -> Result<Option<Reply>> {
    match read.ok_or_else(error::missing)? {
        Ok(read) => Ok(Some(read)),
        Err(refused) if refused.is(code::NO_NODE) => Ok(None),
        Err(refused) => Err(error::refused("fence", refused)),
    }
}

/// Whether others have changed the znodes since they were read.
fn is_conflict(refused: Refused) -> bool {
    [code::NO_NODE, code::NODE_EXISTS, code::BAD_VERSION]
        .into_iter()
        .any(|code| refused.is(code))
}

fn damaged() -> Error {
    let message = "the mark of this resource is damaged; write a token above all before, as 20 \
                   digits, into its node below .palisade/fence/";
    Error::new(ErrorKind::Unusable, "fence", message)
}
