//! What an `http:`, `https:` or `http+unix:` URL says, and how a gateway is found and connected to.
//! What it can do is for the gateway to tell.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::client::{Access, Client, Token};
use super::keys::Names;
use super::{Gateway, HttpEngine};
use palisade_core::engine::{
    EngineFactory, EngineInfo, Era, Settings, SharedEngine, Tokens, Url, config_error,
};
use palisade_core::{Capability, Guarantee, Result};
use palisade_kit::{Asked, Host, SecretFile, Tls, typed_config};

/// The engine's own options.
const OPTIONS: &[&str] = &["tls_ca", "tls_cert", "tls_key", "token_file"];

/// The port of a gateway, where a URL without TLS names none.
const PORT: u16 = 7420;

/// What all gateways have in common. The rest depends on the engine; until that is known, it is the
/// least.
const CAPABILITY: Capability = {
    let mut can = Capability::FULL;
    can.class = Guarantee::Timed;
    can.resize = false;
    can.tokens = Tokens::Floored;
    can.early_loss = false;
    can.detached = false;
    can
};

/// What `connect` knows of it.
pub const FACTORY: EngineFactory = EngineFactory {
    info: EngineInfo {
        name: "gateway",
        schemes: &["http", "https", "http+unix"],
        needs: "a palisade gateway; what is behind it decides",
        example: "http://localhost:7420",
        capability: CAPABILITY,
        options: OPTIONS,
    },
    open: |url, settings| Box::pin(async move { open(url, &settings).await }),
    #[cfg(feature = "baseline")]
    baseline: None,
};

typed_config! {
    /// A palisade gateway, as `palisade::connect` takes it.
    Http
    /// Gateways in front of one engine: `name`, `name:port` or `[address]:port` each.
    hosts of "http"
    texts {
        /// A file with the token in it, which is read at each connect.
        token_file
    }
    tls { |url| url.scheme = "https".to_owned() }
}

impl Http {
    /// The gateway that listens at this socket; an empty path is this user's own.
    pub fn unix(path: impl Into<String>) -> Self {
        let mut url = Url::new("http+unix", Vec::new());
        url.path = path.into();
        Self(url)
    }

    /// The token. It is never shown.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.0.give(GivenToken(token.into()));
        self
    }
}

/// A token from the program, which no URL can contain.
struct GivenToken(String);

/// The folder of this user's own gateway, which is where `palisade serve` makes its socket.
pub fn own_folder() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match runtime.filter(|path| path.is_absolute()) {
        Some(runtime) => runtime.join("palisade"),
        None => format!("/tmp/palisade-{}", rustix::process::getuid().as_raw()).into(),
    }
}

/// The socket of a URL. One that is found by itself must be in a folder that is this user's alone:
/// in a folder for all, anybody could have put one there.
fn socket(path: &str) -> Result<PathBuf> {
    if !path.is_empty() {
        return Ok(path.into());
    }
    let folder = own_folder();
    if is_others(&folder) {
        return Err(config_error(
            "the folder where this user's gateway would be is open to others; name the socket, as \
             in http+unix:/run/palisade/gateway.sock",
        ));
    }
    Ok(folder.join("gateway.sock"))
}

fn is_others(folder: &Path) -> bool {
    let Ok(found) = std::fs::symlink_metadata(folder) else {
        // It does not exist yet.
        return false;
    };
    let own = found.uid() == rustix::process::getuid().as_raw();
    !found.is_dir() || !own || found.mode() & 0o077 != 0
}

/// What a URL says.
struct Options {
    access: Access,
    hosts: Vec<Host>,
    shown: String,
}

impl Options {
    fn take(url: &mut Url, settings: &Settings) -> Result<Self> {
        if url.user.is_some() || url.password.is_some() {
            return Err(config_error(
                "a gateway takes no login in its URL; pass the token with token_file= or \
                 PALISADE_GATEWAY_TOKEN",
            ));
        }
        if settings.era != Era::default() {
            return Err(config_error("a gateway has its own era; omit era="));
        }
        let encrypted = url.scheme == "https";
        let tls = Tls::take(url, encrypted)?;
        let (bases, hosts, socket, shown) = if url.scheme == "http+unix" {
            if !url.hosts.is_empty() {
                return Err(config_error(
                    "http+unix: takes the path of a socket, as in http+unix:/run/palisade/gateway.sock",
                ));
            }
            let socket = socket(&url.path)?;
            let shown = format!("http+unix:{}", socket.display());
            (
                vec!["http://localhost".into()],
                Vec::new(),
                Some(socket),
                shown,
            )
        } else {
            if !matches!(url.path.as_str(), "" | "/") {
                return Err(config_error("the URL of a gateway has no path"));
            }
            let hosts = Host::all(url, if encrypted { 443 } else { PORT })?;
            let scheme = &url.scheme;
            let bases = hosts.iter().map(|host| base(scheme, host).into()).collect();
            (bases, hosts, None, url.shown())
        };
        let access = Access {
            bases,
            socket,
            tls,
            asked: Asked::default(),
            token: token(url)?,
            timeout: settings.timeout,
            connect_timeout: settings.connect_timeout,
        };
        url.finish(OPTIONS)?;
        Ok(Self {
            access,
            hosts,
            shown,
        })
    }
}

/// A gateway's address, without the default port of its scheme. The `Host` header then has no port
/// either, and the gateway compares it with its names.
fn base(scheme: &str, host: &Host) -> String {
    let usual = matches!((scheme, host.port), ("https", 443) | ("http", 80));
    let shown = host.to_string();
    let shown = shown
        .rsplit_once(':')
        .filter(|_| usual)
        .map_or(&*shown, |(name, _)| name);
    format!("{scheme}://{shown}")
}

/// The token: the program's, from the file that the URL names, or from the environment.
fn token(url: &mut Url) -> Result<Token> {
    let given = url.take_given::<GivenToken>();
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let token = match (given, SecretFile::take(url, "token_file")) {
        (Some(_), Some(_)) => return Err(config_error("the token is given twice; give it once")),
        (Some(GivenToken(token)), None) => Token::Given(token),
        (None, Some(file)) => Token::File(file),
        (None, None) => variable("PALISADE_GATEWAY_TOKEN").map_or(Token::None, Token::Given),
    };
    // Fails now rather than at the first request.
    token.read()?;
    Ok(token)
}

async fn open(mut url: Url, settings: &Settings) -> Result<SharedEngine> {
    let options = Options::take(&mut url, settings)?;
    let encrypted = options.access.tls.is_some();
    let client = Client::new(options.access)?;
    let capability = client.describe().await?.capability();
    let default_ttl = settings.ttl.unwrap_or_else(|| capability.default_ttl());
    Ok(Arc::new(HttpEngine(Arc::new(Gateway {
        client,
        names: Names::new(&settings.namespace),
        sessions: Default::default(),
        capability,
        default_ttl,
        hosts: options.hosts,
        encrypted,
        shown: options.shown,
    }))))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use palisade_core::ErrorKind;

    fn options(text: &str) -> Result<Options> {
        let mut url = Url::parse(text)?;
        let settings = url.take_settings()?;
        Options::take(&mut url, &settings)
    }

    #[test]
    fn gateways_are_read() {
        let read = options("http://a,b:9").unwrap();
        let bases: Vec<&str> = read.access.bases.iter().map(|base| &**base).collect();
        assert_eq!(bases, ["http://a:7420", "http://b:9"]);
        assert_eq!(read.shown, "http://a,b:9");
        let read = options("http+unix:/run/g.sock").unwrap();
        assert_eq!(read.access.socket.unwrap(), Path::new("/run/g.sock"));
        assert_eq!(read.shown, "http+unix:/run/g.sock");
        for (scheme, host, port, shown) in [
            ("https", "a", 443, "https://a"),
            ("https", "::1", 443, "https://[::1]"),
            ("http", "::1", 443, "http://[::1]:443"),
            ("http", "a", 80, "http://a"),
        ] {
            let name = host.to_owned();
            assert_eq!(base(scheme, &Host { name, port }), shown);
        }
    }

    #[test]
    fn bad_urls_are_refused_without_repeating_them() {
        for bad in [
            "http://me:hunter2@a",
            "http://hunter2@a",
            "http://a/hunter2",
            "http://a?era=3",
            "http://a?token=hunter2",
            "http://a?token_file=/hunter2",
            "http://a?tls_ca=/hunter2",
            "http+unix://hunter2/x",
            "https://",
        ] {
            let error = options(bad).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config, "{bad}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_looked_in() {
        let folder = tempfile::tempdir().unwrap();
        let set = |mode| std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode));
        set(0o700).unwrap();
        assert!(!is_others(folder.path()));
        set(0o755).unwrap();
        assert!(is_others(folder.path()));
        assert!(!is_others(&folder.path().join("absent")));
    }
}
