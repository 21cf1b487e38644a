//! `palisade guide`: which engine, which URL and which ttl, and why.
//!
//! All that it says about an engine comes from the registry of engines and their capabilities;
//! `needs` has the list of needs, each with a test of that data.

mod needs;

use std::io::{BufRead, IsTerminal, Write};
use std::time::Duration;

use palisade::command::nearest;
use palisade::engine::{EngineInfo, Tokens};
use serde::Serialize;

use self::needs::{NEEDS, Need};
use crate::abilities::meaning;
use crate::args::Global;
use crate::exit::{Failure, Verdict};

/// Services that engines exist for, whether or not this build has them, and their other names.
const KNOWN: &[(&str, &[&str])] = &[
    ("consul", &[]),
    ("etcd", &[]),
    ("file", &["nothing"]),
    ("kubernetes", &["k8s"]),
    ("memory", &[]),
    ("postgres", &["postgresql"]),
    ("redis", &["valkey"]),
    ("redis+cluster", &[]),
    ("redis+sentinel", &["sentinel"]),
    ("redlock", &[]),
    ("zookeeper", &["zk"]),
];

/// A new leader takes over only after the ttl: half a minute is too long for most uses.
const LEADER_TTL: Duration = Duration::from_secs(10);

/// Find the engine that fits: which URL, which ttl, and why
///
/// It asks questions in a terminal; the flags answer them beforehand. It connects to nothing. The
/// exit code is 1 if no engine of this build fits.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("Examples:\n  palisade guide\n  \
    palisade guide --need correctness,many-machines --have postgres,redis\n  \
    palisade guide --need permits --json\n\nNeeds:\n{}", needs::list()))]
pub(crate) struct Guide {
    /// What the lock is for, separated by commas; see below
    #[arg(long, value_name = "NEED", value_delimiter = ',', value_parser = parse_need)]
    need: Vec<&'static Need>,
    /// What you already have, separated by commas: postgres, redis, etcd, …
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = parse_have)]
    have: Vec<&'static str>,
}

/// The whole answer.
#[derive(Debug, Serialize)]
struct Answer {
    needs: Vec<&'static str>,
    have: Vec<&'static str>,
    /// Services that the user has and that this build has no engine for.
    lacking: Vec<&'static str>,
    advice: Option<Advice>,
    others: Vec<Other>,
    /// An engine that would do if the storage compared the tokens.
    #[serde(skip)]
    fenced: Option<&'static str>,
}

/// The engine to use.
#[derive(Debug, Serialize)]
struct Advice {
    engine: &'static str,
    url: String,
    ttl_ms: u64,
    /// `None` if it is not known: that of the engine behind a gateway.
    class: Option<String>,
    why: Vec<String>,
    #[serde(skip)]
    requires: &'static str,
}

/// An engine that was not chosen.
#[derive(Debug, Serialize)]
struct Other {
    engine: &'static str,
    fits: bool,
    why: Vec<String>,
    #[serde(skip)]
    depends: bool,
}

impl Guide {
    pub(crate) async fn run(mut self, global: &Global) -> Verdict {
        if self.need.is_empty() {
            let talks = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
            if !talks || global.json {
                let known: Vec<_> = NEEDS.iter().map(|need| need.word).collect();
                let message = format!("say what you need with --need: {}", known.join(", "));
                return Err(Failure::Usage(message));
            }
            self.ask()?;
        }
        let answer = decide(&self.need, &self.have, &palisade::command::registry());
        let found = answer.advice.is_some();
        global.printer().reply(&answer, Answer::text, found)
    }

    /// Asks the person at the terminal.
    fn ask(&mut self) -> Result<(), Failure> {
        let needs = format!("What must the lock do?\n{}", needs::list());
        self.need = ask(&needs, "needs, separated by commas", parse_need)?;
        if self.have.is_empty() {
            let have = format!("\nWhat do you already have?\n  {}\n", known().join(", "));
            self.have = ask(
                &have,
                "names, separated by commas, or Enter for nothing",
                parse_have,
            )?;
        }
        if self.need.is_empty() {
            self.need = vec![parse_need("efficiency").map_err(Failure::Defect)?];
        }
        Ok(())
    }
}

/// Asks until every word of the answer is understood.
fn ask<T>(
    question: &str,
    prompt: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, Failure> {
    let mut out = std::io::stderr();
    let _ = write!(out, "{question}");
    loop {
        let _ = write!(out, "{prompt}: ");
        let _ = out.flush();
        let mut line = String::new();
        let length = std::io::stdin().lock().read_line(&mut line);
        if length.map_err(|error| Failure::Usage(format!("can't read the answer: {error}")))? == 0 {
            return Err(Failure::Usage("no answer; use --need and --have".into()));
        }
        let words = line
            .split([',', ' ', '\n', '\t'])
            .filter(|word| !word.is_empty());
        match words.map(&read).collect() {
            Ok(answer) => return Ok(answer),
            Err(complaint) => drop(writeln!(out, "{complaint}")),
        }
    }
}

fn parse_need(word: &str) -> Result<&'static Need, String> {
    let found = NEEDS.iter().find(|need| need.word == word.to_lowercase());
    found.ok_or_else(|| unknown(word, NEEDS.iter().map(|need| need.word).collect()))
}

fn parse_have(word: &str) -> Result<&'static str, String> {
    let lower = word.to_lowercase();
    let alias = KNOWN.iter().find(|(_, others)| others.contains(&&*lower));
    let named = || known().into_iter().find(|name| *name == lower);
    let found = alias.map(|(name, _)| *name).or_else(named);
    found.ok_or_else(|| unknown(word, known()))
}

/// The names of engines, those of this build included.
fn known() -> Vec<&'static str> {
    let mut names: Vec<_> = KNOWN.iter().map(|(name, _)| *name).collect();
    names.extend(palisade::command::registry().iter().map(|info| info.name));
    names.sort_unstable();
    names.dedup();
    names
}

fn unknown(word: &str, known: Vec<&'static str>) -> String {
    let hint = match nearest(word, known.iter().copied()) {
        Some(near) => format!("did you mean {near}? "),
        None => String::new(),
    };
    format!("{hint}known names are {}", known.join(", "))
}

/// Whether an engine is for this service: by its name, or by a scheme such as `postgres+advisory`.
fn is_of(info: &EngineInfo, have: &str) -> bool {
    let schemes = info.schemes.iter();
    let mut bases = schemes.filter_map(|scheme| scheme.split('+').next());
    info.name == have || bases.any(|base| base == have)
}

/// Chooses among the engines of this build: first those that the user has, then those without a
/// server, then by class, then durable tokens first, then by their order in the registry.
fn decide(needs: &[&'static Need], have: &[&'static str], infos: &[EngineInfo]) -> Answer {
    let named = |info: &EngineInfo| have.iter().any(|have| is_of(info, have));
    // An engine without a server is always available; if `have` is empty, all are candidates.
    let there = |info: &EngineInfo| have.is_empty() || named(info) || !needs::has_hosts(info);
    let unmet = |info: &EngineInfo| -> Vec<String> {
        let unmet = needs.iter().filter(|need| !(need.fits)(info));
        unmet.map(|need| need.says(info)).collect()
    };
    let mut ranked: Vec<&EngineInfo> = infos.iter().collect();
    ranked.sort_by_key(|info| {
        let fits = unmet(info).is_empty();
        let durable = info.capability.tokens == Tokens::Durable;
        // Prefer an engine that needs no server to one that the user would have to install.
        let extra = have.is_empty() && needs::has_hosts(info);
        let class = info.capability.class;
        (!fits, !there(info), !named(info), extra, class, !durable)
    });
    let chosen = ranked
        .first()
        .filter(|info| unmet(info).is_empty() && there(info));
    let other = |info: &&EngineInfo| {
        let mut why = unmet(info);
        let fits = why.is_empty();
        match (fits, there(info)) {
            (true, false) => why.push(format!("would need {}", info.needs)),
            (true, true) => why.push(class_of(info)),
            (false, _) => {}
        }
        Other {
            engine: info.name,
            fits,
            why,
            depends: needs::is_gateway(info),
        }
    };
    let fails_only = |info: &EngineInfo, word: &str| {
        let mut unmet = needs.iter().filter(|need| !(need.fits)(info));
        unmet.next().is_some_and(|need| need.word == word) && unmet.next().is_none()
    };
    let fenced = ranked.iter().find(|info| {
        let tokens = info.capability.tokens != Tokens::None;
        there(info) && tokens && !needs::is_gateway(info) && fails_only(info, "correctness")
    });
    let lacks = |have: &&&str| !infos.iter().any(|info| is_of(info, have));
    Answer {
        needs: needs.iter().map(|need| need.word).collect(),
        have: have.to_vec(),
        lacking: have.iter().filter(lacks).copied().collect(),
        advice: chosen.map(|info| Advice::new(info, needs)),
        others: ranked
            .iter()
            .skip(usize::from(chosen.is_some()))
            .map(other)
            .collect(),
        fenced: fenced.map(|info| info.name),
    }
}

/// Its class, and what that means.
fn class_of(info: &EngineInfo) -> String {
    let class = info.capability.class;
    if needs::is_gateway(info) {
        return "class: that of the engine behind it".to_owned();
    }
    format!("class {class}: {}", meaning(class))
}

impl Advice {
    fn new(info: &EngineInfo, needs: &[&'static Need]) -> Self {
        let capability = info.capability;
        let leads = needs.iter().any(|need| need.word == "election");
        let wanted = if leads {
            LEADER_TTL.clamp(capability.ttl.min, capability.ttl.max)
        } else {
            capability.default_ttl()
        };
        let ttl = capability.explicit_ttl(wanted).unwrap_or(wanted);
        let shown = humantime::format_duration(ttl);
        let url = if ttl == capability.default_ttl() {
            info.example.to_owned()
        } else {
            let sign = if info.example.contains('?') { '&' } else { '?' };
            let seconds = ttl.as_secs();
            format!("{}{sign}ttl={seconds}s", info.example)
        };
        let mut why: Vec<String> = needs.iter().map(|need| need.says(info)).collect();
        why.push(class_of(info));
        why.push(if leads {
            format!("ttl {shown}: a leader that is cut off is replaced after this time")
        } else {
            format!("ttl {shown}: tolerates a slow renewal, and replaces a lost holder soon")
        });
        Self {
            engine: info.name,
            url,
            ttl_ms: ttl.as_millis() as u64,
            class: (!needs::is_gateway(info)).then(|| capability.class.to_string()),
            why,
            requires: info.needs,
        }
    }
}

impl Answer {
    fn text(&self) -> String {
        let mut text = match &self.advice {
            Some(Advice {
                engine,
                url,
                requires,
                why,
                ..
            }) => {
                let why: String = why.iter().map(|why| format!("- {why}\n")).collect();
                let run = format!("palisade run my-lock --url '{url}' -- true");
                format!("Use {engine}: {requires}.\n\n  {url}\n\n{why}\nTry it: {run}\n")
            }
            None => {
                "No engine of this build meets all of these needs with what you have.\n".to_owned()
            }
        };
        if let (None, Some(engine)) = (&self.advice, self.fenced) {
            text.push_str(&format!(
                "\nNearest is {engine} with a fence: if clocks are wrong or data is lost, two may \
                 hold the\nlock, and storage that compares the fencing token in the step that \
                 writes refuses the\nlate one (docs/fences.md). Without a fence, use an engine \
                 that fits.\n"
            ));
        }
        if !self.others.is_empty() {
            text.push_str("\nThe others:\n");
        }
        for other in &self.others {
            let Other { engine, why, .. } = other;
            let fits = match (other.fits, other.depends) {
                (true, _) => "fits too",
                (false, true) => "depends",
                (false, false) => "no",
            };
            text.push_str(&format!("- {engine} ({fits}): {}\n", why.join("; ")));
        }
        for lacking in &self.lacking {
            text.push_str(&format!(
                "\nYou have {lacking}, but this build has no engine for it.\n"
            ));
        }
        text
    }
}

#[cfg(test)]
mod tests;
