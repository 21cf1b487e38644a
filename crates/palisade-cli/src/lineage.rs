//! What a palisade inside another's command knows of the outer ones, and tells its own command: two
//! variables in the environment. Waiting for a lock that an outer one holds would never end.

use palisade::engine::Ask;
use palisade::report::Ancestor;
use palisade::{Hold, Name};
use serde_json::json;

use crate::view::{ClaimView, LineView};

/// Lists the owners of the locks that the outer palisades hold, the outermost first.
const OWNERS: &str = "PALISADE_ANCESTORS";

/// Lists the claims of the outer palisades, the outermost first, as JSON.
const CLAIMS: &str = "PALISADE_CLAIMS";

/// Only this many of them, the innermost, are passed on: no real script nests deeper.
const DEPTH: usize = 16;

/// The owners of the outer palisades.
pub(crate) fn owners() -> Vec<String> {
    let names = std::env::var(OWNERS).unwrap_or_default();
    names.split_whitespace().map(str::to_owned).collect()
}

/// The claims of the outer palisades.
pub(crate) fn claims() -> Vec<Ancestor> {
    let claims = std::env::var(CLAIMS).unwrap_or_default();
    let mut claims: Vec<Ancestor> = serde_json::from_str(&claims).unwrap_or_default();
    // The variable may have any value, and its content goes into every owner record.
    let is_sound = |claim: &Ancestor| claim.claim.len() <= 32 && Name::new(&claim.name).is_ok();
    claims.retain(is_sound);
    claims.drain(..claims.len().saturating_sub(DEPTH));
    claims
}

/// Both variables for a command of `owner` under `hold`.
pub(crate) fn environment(owner: &str, hold: &Hold) -> [(String, String); 2] {
    let mut owners = owners();
    owners.push(owner.to_owned());
    let mut claims = claims();
    claims.push(Ancestor {
        claim: hold.claim().to_string(),
        name: hold.name().as_str().to_owned(),
    });
    claims.drain(..claims.len().saturating_sub(DEPTH));
    [
        (OWNERS.to_owned(), owners.join(" ")),
        (CLAIMS.to_owned(), json!(claims).to_string()),
    ]
}

/// The holder among `ancestors` that waits for our own end, if we can't get the lock before.
/// `waits`: we are in the line already.
pub(crate) fn in_the_way<'a>(
    line: &'a LineView,
    ask: Ask,
    ancestors: &[String],
    waits: bool,
) -> Option<&'a ClaimView> {
    let is_ancestor = |claim: &&ClaimView| {
        let owner = claim.owner.as_ref();
        owner.is_some_and(|owner| ancestors.contains(owner))
    };
    let theirs = line.holders.iter().filter(is_ancestor);
    let taken: u32 = theirs.clone().map(|claim| claim.weight).sum();
    // There may be enough permits once the other holders have returned theirs. A reader only waits
    // behind a writer, which waits for our ancestor.
    let enough = ask.weight_in(line.capacity).saturating_add(taken) <= line.capacity
        && (line.kind == "permits" || !waits);
    theirs.clone().next().filter(|_| !enough)
}
