//! Tips for arguments that could not be read, where clap has none, or one that does not help: words
//! and flags of other tools, misspelt verbs, names that start with a dash.
//!
//! A verb that destroys something is suggested only for a word that is almost its name.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue};
use palisade::command::nearest;

use crate::args::{Args, own_arguments, words};

/// Verbs that take something away from others.
const DESTRUCTIVE: [&str; 2] = ["drop", "evict"];

/// Words of other tools, by the verb before them, and what does that here.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    (
        "",
        "lock flock mutex exec with take semaphore",
        "palisade run NAME -- CMD runs a command under a lock; palisade acquire NAME takes one for \
         the rest of a script",
    ),
    (
        "",
        "unlock free",
        "palisade release NAME releases a lock that palisade acquire took",
    ),
    (
        "",
        "steal break kill revoke",
        "palisade evict NAME takes a lock away from its holder",
    ),
    (
        "",
        "push pop work enqueue dequeue consume",
        "work queues: palisade queue push NAME, palisade queue work NAME -- CMD",
    ),
    ("", "list", "palisade ls lists all locks"),
    (
        "",
        "status info get",
        "palisade show NAME shows one lock, palisade ls all of them",
    ),
    (
        "",
        "watch monitor",
        "palisade ls --watch, or palisade top over the whole screen",
    ),
    (
        "",
        "token",
        "palisade serve token NAME makes a gateway's token",
    ),
    ("", "gateway server daemon", "palisade serve is the gateway"),
    (
        "queue",
        "pop take get next claim consume receive dequeue shift reserve",
        "palisade queue work NAME -- CMD runs CMD for each message and then removes it; palisade \
         queue show NAME only lists them",
    ),
    (
        "queue",
        "add put send enqueue publish",
        "palisade queue push NAME stores a message",
    ),
    (
        "queue",
        "list status",
        "palisade queue ls counts the messages of each queue",
    ),
    (
        "queue",
        "peek read cat",
        "palisade queue show NAME ID shows a message",
    ),
    (
        "queue",
        "delete remove rm purge clear",
        "palisade queue drop NAME removes messages without processing them",
    ),
];

/// Adds a suggestion that clap can't make, in place of one that does not help.
pub(crate) fn with_suggestion(mut error: clap::Error) -> clap::Error {
    let words = words(own_arguments());
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    if let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
        && let Some(tip) = tip(
            argument,
            &words,
            error.get(ContextKind::SuggestedArg).is_some(),
        )
    {
        suggest(&mut error, tip);
        return error;
    }
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return error;
    };
    let word = word.clone();
    if let Some(tip) = elsewhere(&word, &words) {
        error.remove(ContextKind::SuggestedSubcommand);
        suggest(&mut error, tip.to_owned());
        return error;
    }
    let near = match error.remove(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::Strings(near)) => near,
        Some(ContextValue::String(near)) => vec![near],
        _ => meant_verb(&word, &words).into_iter().collect(),
    };
    let harmless = |verb: &String| !DESTRUCTIVE.contains(&&**verb) || is_almost(&word, verb);
    let near: Vec<_> = near.into_iter().filter(harmless).collect();
    if !near.is_empty() {
        error.insert(
            ContextKind::SuggestedSubcommand,
            ContextValue::Strings(near),
        );
    }
    error
}

fn suggest(error: &mut clap::Error, tip: String) {
    let tip = ContextValue::StyledStrs(vec![tip.into()]);
    error.insert(ContextKind::Suggested, tip);
}

/// What does the same as a verb of another tool.
fn elsewhere(word: &str, words: &[&str]) -> Option<&'static str> {
    let before = words.iter().take_while(|before| **before != word);
    let before = before.copied().last().unwrap_or_default();
    let found = ELSEWHERE.iter().find(|(verb, theirs, _)| {
        *verb == before
            && theirs
                .split(' ')
                .any(|theirs| theirs == word.to_lowercase())
    });
    found.map(|(.., tip)| *tip)
}

/// What the standard library says of a number, and what people can do about it.
const NUMBERS: [(&str, &str); 4] = [
    ("invalid digit found in string", "write a whole number"),
    (
        "cannot parse integer from empty string",
        "write a whole number",
    ),
    (
        "number too large to fit in target type",
        "the number is too large",
    ),
    (
        "number would be zero for non-zero type",
        "write a number above 0",
    ),
];

/// A message with the words of the standard library replaced.
pub(crate) fn in_words(text: &str) -> String {
    let replaced = |text: String, (its, ours): &(&str, &str)| text.replace(its, ours);
    NUMBERS.iter().fold(text.to_owned(), replaced)
}

/// A tip for an unknown argument: it may belong to the command, be a flag of flock, or a name that
/// starts with a dash. `near`: there is an option of a similar name.
fn tip(argument: &str, words: &[&str], near: bool) -> Option<String> {
    // `-E -1`, or a name?
    if argument.starts_with('-') && argument[1..].starts_with(|c: char| c.is_ascii_digit()) {
        let tip = "numbers and durations can't be negative; a name that starts with a dash goes \
                   after --";
        return Some(tip.to_owned());
    }
    let (verb, rest) = match words {
        ["queue", "work", rest @ ..] => ("queue work", rest),
        ["queue", "push", ..] if !argument.starts_with('-') => {
            let tip = "the message is read from FILE or stdin; write a text as one word in quotes \
                       after --body, as in --body 'hello world'";
            return Some(tip.to_owned());
        }
        [verb @ ("run" | "elect" | "acquire"), rest @ ..] => (*verb, rest),
        _ => return None,
    };
    let of_flock = verb != "queue work";
    let flag = match argument {
        "-n" | "--nb" | "--nonblock" if of_flock => {
            "use --no-wait to end at once when the lock is held"
        }
        "-w" | "--timeout" if of_flock => "use --wait with a unit, as in --wait 10s",
        "-s" if of_flock => "use --shared to share the lock with other --shared holders",
        "-x" | "-e" | "--exclusive" if of_flock && !rest.is_empty() => {
            "omit it: a lock is exclusive unless --shared is given"
        }
        "-c" | "--command" if of_flock => "write the command after --, as in -- sh -c 'COMMAND'",
        option if option.starts_with('-') => {
            // `acquire -- -x` is what clap's own tip says.
            if near || verb == "acquire" || option.contains(' ') {
                return None;
            }
            let name = option.split('=').next().unwrap_or_default();
            return Some(format!(
                "options of the command go after --, as in palisade {verb} NAME -- CMD {name}; so \
                 does a name that starts with a dash: palisade {verb} -- {name} -- CMD"
            ));
        }
        _ if verb == "acquire" => return None,
        _ => {
            return Some(format!(
                "write the command after --, as in palisade {verb} NAME -- CMD"
            ));
        }
    };
    Some(flag.to_owned())
}

/// The verb nearest to `word`, or the nearest part of the verb that precedes it.
fn meant_verb(word: &str, words: &[&str]) -> Option<String> {
    let verbs = Args::command();
    let mut before = words.iter().take_while(|before| **before != word);
    let verb = before.find_map(|before| verbs.find_subcommand(before));
    let names = || {
        let among = verb.unwrap_or(&verbs);
        among.get_subcommands().map(clap::Command::get_name)
    };
    let swapped = names().find(|name| are_swapped(name, word));
    swapped
        .or_else(|| nearest(word, names()))
        .map(str::to_owned)
}

/// Whether two words have the same letters.
fn are_swapped(one: &str, other: &str) -> bool {
    let letters = |word: &str| {
        let mut letters: Vec<char> = word.chars().collect();
        letters.sort_unstable();
        letters
    };
    letters(one) == letters(other)
}

/// Whether a word is a name with one letter more, less or changed, or with letters swapped.
fn is_almost(word: &str, name: &str) -> bool {
    let (word, name) = (word.to_lowercase(), name.to_lowercase());
    let (one, other): (Vec<_>, Vec<_>) = (word.chars().collect(), name.chars().collect());
    let common = |pairs: &mut dyn Iterator<Item = (&char, &char)>| {
        pairs.take_while(|(one, other)| one == other).count()
    };
    let front = common(&mut one.iter().zip(&other));
    let back = common(&mut one.iter().rev().zip(other.iter().rev()));
    front + back + 1 >= one.len().max(other.len()) || are_swapped(&word, &name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swapped_letters_are_seen_through() {
        let meant = |words: &[&str]| meant_verb(words.last().unwrap(), words);
        assert_eq!(meant(&["rnu"]).as_deref(), Some("run"));
        assert_eq!(meant(&["sl"]).as_deref(), Some("ls"));
        assert_eq!(meant(&["juggle"]), None);
        assert_eq!(meant(&["config", "apth"]).as_deref(), Some("path"));
        assert_eq!(meant(&["config", "sl"]), None);
    }

    #[test]
    fn almost_is_one_letter() {
        for word in ["drop", "drp", "dropp", "drip", "rdop", "DROP"] {
            assert!(is_almost(word, "drop"), "{word}");
        }
        for word in ["pop", "dump", "top", "do", "", "droppings"] {
            assert!(!is_almost(word, "drop"), "{word}");
        }
    }

    /// A word that is a verb here is no other tool's, and a tip names only what there is.
    #[test]
    fn words_of_other_tools_lead_to_verbs() {
        let verbs = Args::command();
        for (before, theirs, tip) in ELSEWHERE {
            let among = match *before {
                "" => &verbs,
                before => verbs.find_subcommand(before).unwrap(),
            };
            for word in theirs.split(' ') {
                assert!(among.find_subcommand(word).is_none(), "{before} {word}");
            }
            for named in tip.split("palisade ").skip(1) {
                let verb = named.split(' ').next().unwrap();
                assert!(verbs.find_subcommand(verb).is_some(), "{verb} in {tip}");
            }
        }
    }
}
