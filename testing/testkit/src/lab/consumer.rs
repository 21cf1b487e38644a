//! A consumer and a producer of a work queue in separate processes, which can be stopped and
//! killed.
//!
//! `palisade-testkit produce URL QUEUE PREFIX COUNT` pushes messages one after another, and prints
//! the number of each when it is stored.
//!
//! `palisade-testkit consume URL QUEUE EFFECT TARGET MILLIS` handles messages, one after another,
//! until it is killed. Each has an effect on TARGET (a database, a server, a directory) and takes
//! some milliseconds of work. The test evaluates the effects.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use palisade::config::redis;
use palisade::engines::postgres::PostgresMessage;
use palisade::engines::redis::{Effect as Script, RedisMessage};
use palisade::fence::{Fence, FileFence, Verdict};
use palisade::queue::{Message, Queue};
use palisade::{BootTime, ErrorKind, Name};

/// What handling a message does, and how it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Effect and `done` are one step, or the effect is a fenced write under the message's id.
    OneStep,
    /// The effect, then the work, then `done`: the control, in which effects happen twice.
    TwoSteps,
    /// Records the beginning and the end of each message, to check the order within keys.
    Order,
    /// One message, held until a line arrives on stdin, then done.
    Hold,
}

impl Effect {
    /// Its name as an argument.
    pub fn word(self) -> &'static str {
        match self {
            Self::OneStep => "one-step",
            Self::TwoSteps => "two-steps",
            Self::Order => "order",
            Self::Hold => "hold",
        }
    }

    fn of(word: &str) -> Option<Self> {
        let mut all = [Self::OneStep, Self::TwoSteps, Self::Order, Self::Hold].into_iter();
        all.find(|effect| effect.word() == word)
    }
}

/// Runs a consumer if the arguments ask for one.
pub fn main(arguments: &[String]) -> Option<ExitCode> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (url, queue, effect, target, millis) = match arguments[..] {
        ["produce", url, queue, prefix, count] => {
            return Some(run(produce(url, queue, prefix, count)));
        }
        ["consume", url, queue, effect, target, millis] => (url, queue, effect, target, millis),
        _ => return None,
    };
    let (Some(effect), Ok(millis)) = (Effect::of(effect), millis.parse()) else {
        eprintln!("consume URL QUEUE one-step|two-steps|order|hold TARGET MILLIS");
        return Some(ExitCode::from(2));
    };
    Some(run(consume(url, queue, effect, target, millis)))
}

fn run(work: impl Future<Output = AnyResult<()>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(work),
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("process {}: {error:?}", std::process::id());
            ExitCode::FAILURE
        }
    }
}

type AnyResult<T> = Result<T, Box<dyn std::error::Error>>;

async fn produce(url: &str, queue: &str, prefix: &str, count: &str) -> AnyResult<()> {
    let queue = palisade::connect(url).await?.queue(queue);
    for number in 0..count.parse::<u64>()? {
        queue.push(format!("{prefix}{number}")).await?;
        println!("{number}");
    }
    Ok(())
}

/// Where effects are written.
enum Target {
    Database(Box<tokio_postgres::Client>),
    Redis(redis::aio::MultiplexedConnection),
    Folder(PathBuf),
}

async fn consume(
    url: &str,
    queue: &str,
    effect: Effect,
    target: &str,
    millis: u64,
) -> AnyResult<()> {
    let queue = palisade::connect(url).await?.queue(queue);
    let queue = queue.ttl(Duration::from_secs(2));
    let mut target = match target {
        url if url.starts_with("postgres") => {
            let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            Target::Database(Box::new(client))
        }
        url if url.starts_with("redis") => {
            let client = redis::Client::open(url)?;
            Target::Redis(client.get_multiplexed_async_connection().await?)
        }
        folder => Target::Folder(PathBuf::from(folder)),
    };
    let work = Duration::from_millis(millis);
    if effect == Effect::Hold {
        return hold(&queue).await;
    }
    loop {
        let message = queue.next().await?;
        let went = match effect {
            Effect::OneStep => one_step(message, &mut target, work).await,
            Effect::TwoSteps => two_steps(message, &mut target, work).await,
            Effect::Order => order(message, &target, work).await,
            Effect::Hold => Ok(()),
        };
        match went {
            Err(error) if is_loss(&*error) => {}
            went => went?,
        }
    }
}

/// Whether a message went to another consumer, which is no failure.
fn is_loss(error: &(dyn std::error::Error + 'static)) -> bool {
    let error = error.downcast_ref::<palisade::Error>();
    error.is_some_and(|error| error.kind() == ErrorKind::Lost)
}

async fn one_step(message: Message, target: &mut Target, work: Duration) -> AnyResult<()> {
    tokio::time::sleep(work).await;
    match target {
        Target::Database(client) => {
            let transaction = client.transaction().await?;
            let insert = "INSERT INTO effect (queue, id) VALUES ($1, $2)";
            let queue = message.queue().as_str();
            transaction
                .execute(insert, &[&queue, &message.id()])
                .await?;
            message.done_in(&transaction).await?;
            transaction.commit().await?;
            message.settled();
        }
        Target::Redis(_) => {
            let count = Script::new("return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)");
            let count = count.key(effects_key(&message)).arg(message.id());
            message.done_with(count).await?;
        }
        Target::Folder(folder) => {
            let fence = FileFence::open(folder.join("fenced"))?;
            let (id, token) = (Name::new(message.id())?, message.token());
            let written = fence.write(&id, token.into(), message.body().to_vec());
            if written.await? == Verdict::Accepted {
                message.done().await?;
            }
        }
    }
    Ok(())
}

async fn two_steps(message: Message, target: &mut Target, work: Duration) -> AnyResult<()> {
    match target {
        Target::Database(client) => {
            let insert = "INSERT INTO effect (queue, id) VALUES ($1, $2)";
            let queue = message.queue().as_str();
            client.execute(insert, &[&queue, &message.id()]).await?;
        }
        Target::Redis(connection) => {
            let mut count = redis::cmd("HINCRBY");
            count.arg(effects_key(&message)).arg(message.id()).arg(1);
            count.exec_async(connection).await?;
        }
        Target::Folder(folder) => append(&folder.join("effects"), message.id())?,
    }
    tokio::time::sleep(work).await;
    message.done().await?;
    Ok(())
}

/// The key where a server counts effects.
fn effects_key(message: &Message) -> String {
    format!("effects of {}", message.queue())
}

async fn order(message: Message, target: &Target, work: Duration) -> AnyResult<()> {
    let Target::Folder(folder) = target else {
        return Err("the order is noted in a folder".into());
    };
    let note = |what: &str| {
        let (key, pid) = (message.key().unwrap_or("-"), std::process::id());
        let body = String::from_utf8_lossy(message.body());
        let at = BootTime::now().as_nanos();
        append(
            &folder.join("order"),
            &format!("{what} {key} {body} {pid} {at}"),
        )
    };
    note("start")?;
    tokio::time::sleep(work).await;
    note("end")?;
    message.done().await?;
    Ok(())
}

/// Holds one message, and prints what becomes of it.
async fn hold(queue: &Queue) -> AnyResult<()> {
    let message = queue.next().await?;
    println!("claimed {}", message.token());
    // Blocking is fine: the keeper has its own thread.
    std::io::stdin().read_line(&mut String::new())?;
    let valid = message.is_valid();
    match message.done().await {
        Ok(()) => println!("done valid={valid}"),
        Err(error) => println!("{} valid={valid}", error.kind().code()),
    }
    Ok(())
}

/// Appends a line with one write, so that lines of several processes don't mix.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}
