//! The pages agree with the code: links resolve, the README's table of engines equals the engines'
//! own capability, each engine's page lists all of its options, and environment variables and exit
//! codes are those of the code. `shell` and `palisade-docs` run the programs in the pages.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use palisade::engine::{Permits, Tokens};
use palisade::{Capability, Guarantee};
use palisade_testkit::lab::pages::{pages as every_page, root};

fn read(page: impl AsRef<Path>) -> String {
    let path = root().join(page);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn pages() -> Vec<PathBuf> {
    every_page(&root())
}

/// The text without its code, which contains no links.
fn prose(page: &str) -> String {
    let mut code = false;
    let lines = page.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    });
    let kept: Vec<&str> = lines.collect();
    kept.join("\n")
}

/// The targets of a page's links and pictures.
fn links(page: &str) -> Vec<String> {
    let text = prose(page);
    let forms = [("](", ')'), ("src=\"", '"'), ("srcset=\"", '"')];
    let targets = forms.into_iter().flat_map(|(begin, end)| {
        let targets = text.split(begin).skip(1);
        targets.filter_map(move |behind| Some(behind.split_once(end)?.0.to_owned()))
    });
    targets.collect()
}

/// The anchor of each heading, as the public hosts generate it.
fn anchors(page: &str) -> BTreeSet<String> {
    let text = prose(page);
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let named = headings.map(|line| {
        let kept = line.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        });
        kept.collect()
    });
    named.collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut dead = Vec::new();
    for page in pages() {
        let text = read(&page);
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let there = root().join(&target).exists();
            let named = anchor.is_empty() || there && anchors(&read(&target)).contains(anchor);
            if !there || !named {
                dead.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{dead:#?}");
}

#[test]
fn every_page_is_linked_from_the_readme_or_a_page_of_it() {
    let mut reached = BTreeSet::from([root().join("README.md").canonicalize().unwrap()]);
    let mut open: Vec<PathBuf> = reached.iter().cloned().collect();
    while let Some(page) = open.pop() {
        for link in links(&fs::read_to_string(&page).unwrap()) {
            let file = link.split('#').next().unwrap_or_default();
            let target = page.parent().unwrap().join(file).canonicalize();
            if let Ok(target) = target
                && target.extension().is_some_and(|is| is == "md")
                && reached.insert(target.clone())
            {
                open.push(target);
            }
        }
    }
    let missing = pages().into_iter();
    let missing =
        missing.filter(|page| !reached.contains(&root().join(page).canonicalize().unwrap()));
    let missing: Vec<_> = missing.filter(|page| page.starts_with("docs")).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The columns after "for", in the README's words.
fn words(capability: &Capability) -> [&'static str; 6] {
    let yes = |yes| if yes { "yes" } else { "no" };
    [
        match capability.class {
            Guarantee::Consensus => "A",
            Guarantee::Durable => "B",
            _ => "C",
        },
        yes(capability.shared),
        match capability.permits {
            Permits::Weighted => "weighted",
            Permits::Slots => "one by one",
            Permits::None => "no",
        },
        yes(capability.fair),
        match capability.tokens {
            Tokens::Durable => "durable",
            Tokens::Floored => "floored by the clock",
            Tokens::None => "no",
        },
        yes(capability.early_loss),
    ]
}

/// The rows of the README's table of engines: the schemes and the page of each, and its other
/// cells.
fn rows(readme: &str) -> Vec<(Vec<String>, String, Vec<String>)> {
    let rows = readme.lines().filter(|line| line.starts_with("| [`"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let urls = cells[0].split('`').skip(1).step_by(2);
        let schemes = urls.map(|url| url.split(':').next().unwrap().to_owned());
        let page = links(cells[0]).pop().unwrap();
        let rest = cells[2..].iter().map(|cell| (*cell).to_owned());
        (schemes.collect(), page, rest.collect())
    })
    .collect()
}

#[test]
fn the_table_of_engines_is_their_capability() {
    let (rows, engines) = (rows(&read("README.md")), palisade::command::registry());
    for (schemes, _, cells) in &rows {
        for scheme in schemes {
            let engine = engines
                .iter()
                .find(|e| e.schemes.contains(&scheme.as_str()));
            let engine = engine.unwrap_or_else(|| panic!("no engine has {scheme}:"));
            // The capability of a gateway is only known after connecting.
            if cells[0] == "that of its engine" {
                assert_eq!(engine.name, "gateway");
                continue;
            }
            assert_eq!(cells.as_slice(), words(&engine.capability), "{scheme}:");
        }
    }
    for engine in engines {
        let listed = rows.iter().any(|(schemes, ..)| {
            let first = engine.schemes.first().unwrap();
            schemes.iter().any(|scheme| scheme == first)
        });
        assert!(listed, "{} is not in the table", engine.name);
    }
}

/// The rest of the capability table, as in `docs/choosing.md`.
fn capability_table() -> String {
    let yes = |yes| if yes { "yes" } else { "no" };
    let head = "| engine | readers | permits | resized | in line | waiters shown | detached | queues | ttl |\n|---|---|---|---|---|---|---|---|---|\n";
    let rows = palisade::command::registry()
        .into_iter()
        .filter(|engine| engine.name != "gateway");
    let rows = rows.map(|engine| {
        let (can, ttl) = (engine.capability, engine.capability.ttl);
        let permits = match can.permits {
            Permits::Weighted => "by weight",
            Permits::Slots => "one by one",
            Permits::None => "no",
        };
        format!(
            "| `{}:` | {} | {permits} | {} | {} | {} | {} | {} | {} to {} |\n",
            engine.schemes.first().unwrap(),
            yes(can.shared),
            yes(can.resize),
            yes(can.fair),
            yes(can.waiters_visible),
            yes(can.detached),
            yes(can.queue),
            span(ttl.min),
            span(ttl.max),
        )
    });
    head.to_owned() + &rows.collect::<String>()
}

/// A duration in the notation of the pages.
fn span(time: Duration) -> String {
    match time.as_millis() {
        hours if hours % 3_600_000 == 0 => format!("{} h", hours / 3_600_000),
        millis if millis >= 1000 => format!("{} s", time.as_secs_f64()),
        millis => format!("{millis} ms"),
    }
}

#[test]
fn the_table_for_choosing_is_the_capability_of_the_engines() {
    let page = read("docs/choosing.md");
    let (before, behind) = page.split_once("<!-- table: capability -->\n").unwrap();
    let (_, behind) = behind.split_once("\n- **in line**").unwrap();
    let marker = "<!-- table: capability -->\n";
    let made = format!(
        "{before}{marker}{}\n- **in line**{behind}",
        capability_table()
    );
    if std::env::var_os("PALISADE_BLESS").is_some() {
        fs::write(root().join("docs/choosing.md"), made).unwrap();
    } else {
        assert!(
            page == made,
            "docs/choosing.md is stale: run this test with PALISADE_BLESS=1"
        );
    }
}

#[test]
fn the_page_of_an_engine_has_all_of_its_options() {
    let rows = rows(&read("README.md"));
    for engine in palisade::command::registry() {
        let first = *engine.schemes.first().unwrap();
        let row = rows
            .iter()
            .find(|(schemes, ..)| schemes.iter().any(|s| s == first));
        let page = read(&row.unwrap_or_else(|| panic!("{first}: has no row")).1);
        for option in engine.options {
            let shown =
                page.contains(&format!("`{option}`")) || page.contains(&format!("`{option}="));
            assert!(shown, "{}: {option} is not on its page", engine.name);
        }
    }
}

/// The words in a text that start with `begin` and continue in capitals.
fn capitals(text: &str, begin: &str) -> BTreeSet<String> {
    let end = |rest: &str| {
        rest.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_')
    };
    text.match_indices(begin)
        .map(|(at, _)| &text[at..])
        .map(|rest| rest[..end(rest).unwrap_or(rest.len())].to_owned())
        .collect()
}

/// Collects the text of all files below a directory.
fn texts(folder: &Path, found: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && name != "node_modules" {
            texts(&path, found);
        } else if let Ok(text) = fs::read_to_string(&path)
            && !name.ends_with(".md")
        {
            found.push_str(&text);
        }
    }
}

/// The crates in a folder of the project.
fn folders(of: &str) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(root().join(of)).unwrap();
    entries.map(|entry| entry.unwrap().path())
}

#[test]
fn environment_variables_on_pages_are_those_of_the_code() {
    let pages: String = pages().iter().map(read).collect();
    let shown = capitals(&pages, "PALISADE_");
    let (mut programs, mut everything) = (String::new(), read("test"));
    for crate_folder in folders("crates").chain(folders("engines")) {
        texts(&crate_folder.join("src"), &mut programs);
    }
    for folder in ["clients", "crates", "engines", "testing"] {
        texts(&root().join(folder), &mut everything);
    }
    // Only tests set these.
    let ours = ["PALISADE_KNOWN_BAD", "PALISADE_TEST_PANIC"].map(str::to_owned);
    let used: BTreeSet<_> = programs
        .split('"')
        .flat_map(|text| {
            let whole = capitals(text, "PALISADE_")
                .into_iter()
                .filter(|name| name == text);
            whole.collect::<Vec<_>>()
        })
        .collect();
    let silent: Vec<_> = used
        .iter()
        .filter(|name| !shown.contains(*name) && !ours.contains(name))
        .collect();
    assert!(silent.is_empty(), "on no page: {silent:?}");
    assert!(used.len() > 8, "{used:?}");
    let unknown: Vec<_> = shown
        .iter()
        .filter(|name| !everything.contains(name.as_str()))
        .collect();
    assert!(unknown.is_empty(), "in no code: {unknown:?}");
}

#[test]
fn exit_codes_on_pages_are_those_of_the_table() {
    let command = read("docs/command.md");
    let table: Vec<(&str, &str)> = command
        .split("## Exit codes")
        .nth(1)
        .unwrap()
        .lines()
        .filter_map(|row| row.strip_prefix("| ")?.split_once(" | "))
        .collect();
    let mut wrong = Vec::new();
    for page in pages() {
        let text = read(&page);
        let mut rest = text.as_str();
        // `word` (exit code N), or (`word`, exit code N)
        while let Some((before, behind)) = rest.split_once("exit code ") {
            rest = behind;
            let number: String = behind.chars().take_while(char::is_ascii_digit).collect();
            let word = before
                .strip_suffix("` (")
                .or_else(|| before.strip_suffix("`, "));
            if let Some(word) = word.and_then(|before| before.rsplit('`').next())
                && !number.is_empty()
                && word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
            {
                let row = table.iter().find(|(code, _)| *code == number);
                if !row.is_some_and(|(_, row)| row.contains(&format!("`{word}`"))) {
                    wrong.push(format!("{}: {word} is not {number}", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
