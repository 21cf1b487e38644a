//! Which engine: `--url`, then `PALISADE_URL`, then the config file, then the embedded default.

use palisade::{Error, Kind};

use crate::exit::Failure;

/// All processes of this machine, with nothing to install.
const EMBEDDED: &str = "file:";

/// The URL of the engine to use.
pub(crate) fn url(flag: Option<&str>) -> Result<String, Failure> {
    if let Some(url) = flag {
        return Ok(url.to_owned());
    }
    if let Some(url) = from_environment()? {
        return Ok(url);
    }
    Ok(from_file()?.unwrap_or_else(|| EMBEDDED.to_owned()))
}

fn from_environment() -> Result<Option<String>, Failure> {
    match std::env::var_os("PALISADE_URL").map(|url| url.into_string()) {
        None => Ok(None),
        Some(Ok(url)) => Ok(Some(url).filter(|url| !url.is_empty())),
        Some(Err(_)) => {
            let why = "PALISADE_URL is not valid UTF-8";
            Err(Error::new(Kind::Config, "connect", why).into())
        }
    }
}

/// The config file is not read yet; its `url` belongs here.
fn from_file() -> Result<Option<String>, Failure> {
    Ok(None)
}
