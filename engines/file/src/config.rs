//! The engine's registry entry, its options and its typed configuration.

use std::path::PathBuf;

use palisade_core::engine::{EndsWith, EngineFactory, EngineInfo, Url, config_error};
use palisade_core::{Capability, Result};
use palisade_kit::typed_config;

/// The engine's own options.
const OPTIONS: &[&str] = &["allow_network_fs", "ends_with", "shared"];

pub(super) const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    // A hold ends with the process that has it.
    can.detached = false;
    can.ends_with = EndsWith::Process;
    can.queue = cfg!(feature = "queue");
    can
};

/// The engine's entry in the registry.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "file",
        schemes: &["file"],
        needs: "a directory on a local disk; all processes of one user (or group) of one machine",
        example: "file:",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { super::open(url, &settings).await }),
    #[cfg(feature = "baseline")]
    baseline: Some(|url, _| Box::pin(async move { super::baseline::open_baseline(url) })),
};

typed_config! {
    /// An embedded store, for `palisade::connect`.
    File
}

impl File {
    /// The store in this directory, which is created if it does not exist.
    pub fn new(directory: impl Into<String>) -> Self {
        let mut url = Url::new("file", Vec::new());
        url.path = directory.into();
        Self(url)
    }

    /// Shares the store with the group of the directory, instead of this user alone.
    pub fn shared_by_group(mut self) -> Self {
        self.0.set("shared", "group");
        self
    }

    /// Keeps the holds of this process until their leases end, even if the process dies: for a
    /// process that passes its holds on to others, such as a gateway.
    pub fn ends_with_lease(mut self) -> Self {
        self.0.set("ends_with", "lease");
        self
    }

    /// Accepts a network file system, where locks can't be relied on.
    pub fn allow_network_fs(mut self) -> Self {
        self.0.set("allow_network_fs", true);
        self
    }
}

/// Who may use a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Audience {
    /// The user who made it.
    User,
    /// The group of its directory.
    Group,
}

/// The content of a URL.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub(super) path: PathBuf,
    pub(super) audience: Audience,
    pub(super) allow_network_fs: bool,
    /// Whether holds of this process outlive it, until their leases end.
    pub(super) by_lease: bool,
}

impl Config {
    /// Parses a URL.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) for invalid options.
    pub(super) fn from_url(mut url: Url) -> Result<Self> {
        let allow_network_fs = url.take_flag("allow_network_fs")?;
        let audience = match url.take("shared").as_deref() {
            None => Audience::User,
            Some("group") => Audience::Group,
            Some(_) => return Err(config_error("option shared must be group or omitted")),
        };
        let by_lease = match url.take("ends_with").as_deref() {
            None | Some("process") => false,
            Some("lease") => true,
            Some(_) => return Err(config_error("option ends_with must be process or lease")),
        };
        url.finish(OPTIONS)?;
        Ok(Self {
            by_lease,
            path: locate(&url)?,
            audience,
            allow_network_fs,
        })
    }
}

/// The directory of the store.
///
/// # Errors
/// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) if the URL names a host, or no directory and
/// there is no default.
pub fn locate(url: &Url) -> Result<PathBuf> {
    if !url.hosts.is_empty() {
        return Err(config_error(
            "file: takes a directory, not a host; write file:/var/lib/locks",
        ));
    }
    if !url.path.is_empty() {
        return Ok(PathBuf::from(&url.path));
    }
    let absolute = |variable| {
        std::env::var_os(variable)
            .map(PathBuf::from)
            .filter(|path: &PathBuf| path.is_absolute())
    };
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|state| state.join("palisade"))
        .ok_or_else(|| {
            config_error("no directory given, and neither XDG_STATE_HOME nor HOME is set; write file:/var/lib/locks")
        })
}
