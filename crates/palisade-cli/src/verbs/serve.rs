//! `palisade serve`: a gateway in front of the engine, for programs that speak HTTP.
//!
//! `palisade-gateway` decides which requests are allowed. This file has the flags, the token of
//! the port, which only this user may read, and the signals that end the gateway.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use opentelemetry_otlp::RetryPolicy;
use palisade::command::{own_folder, parse_duration, rounded};
use palisade::engine::Url;
use palisade::{Error, ErrorKind, Name};
use palisade_gateway::{Audit, Config, Gateway, Limits, Metrics, Stays, new_token, private_folder};
use serde::Serialize;
use serde_json::json;
use tokio::sync::oneshot;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict, at_once};
use crate::signals::Endings;
use crate::traces::Traces;
use crate::view::shown;

/// How many holds that stay are listed for a person.
const STAYING_SHOWN: usize = 20;

/// Serve the engine's locks over HTTP
///
/// Programs of this user reach it through a socket without a token, and through a port of this
/// machine with the token in a file next to the socket. To listen on other addresses it needs TLS
/// and an access file.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  palisade serve\n  \
        palisade serve --listen 10.0.0.7:7420 --tls-cert c.pem --tls-key k.pem --access access.toml\n  \
        palisade serve token billing"
)]
pub(crate) struct Serve {
    #[command(subcommand)]
    what: Option<What>,
    /// The address to listen at
    #[arg(
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1:7420",
        conflicts_with = "no_port",
        value_parser = parse_address
    )]
    listen: SocketAddr,
    /// Listen at the socket only, where there is no TLS
    #[arg(long)]
    no_port: bool,
    /// The socket to listen at [default: gateway.sock in $XDG_RUNTIME_DIR/palisade, or in
    /// /tmp/palisade-UID]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The access file: who may do what, as TOML; see docs/gateway.md
    #[arg(long, value_name = "FILE")]
    access: Option<PathBuf>,
    /// The certificate chain, as PEM
    #[arg(
        long,
        value_name = "FILE",
        requires = "tls_key",
        conflicts_with = "no_port"
    )]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Require neither TLS nor a token: a proxy in front of the gateway provides both
    #[arg(long)]
    insecure: bool,
    /// The URL that clients use for the gateway, such as `https://locks.example.com`; repeatable.
    /// Sessions are told to use the first one
    #[arg(long, value_name = "URL")]
    public_url: Vec<String>,
    /// How long sessions are kept while the gateway drains after a signal
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "60s")]
    drain: Duration,
    /// The number of sessions that one principal may have
    #[arg(long, value_name = "N", default_value = "1000")]
    max_sessions: NonZeroUsize,
    /// The number of claims that one principal may have
    #[arg(long, value_name = "N", default_value = "10000")]
    max_claims: NonZeroUsize,
    /// The number of waiting requests that one principal may have
    #[arg(long, value_name = "N", default_value = "10000")]
    max_waiting: NonZeroUsize,
    /// The number of connections from one address that have not shown a valid token; 0 for any
    /// number, if clients come through a proxy
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_per_peer: usize,
    /// The longest ttl that a client may ask for. After a reboot the engine `file:` grants nothing
    /// for as long as a ttl that clients may rely on [default: 24h, on `file:` 1h]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    max_ttl: Option<Duration>,
    /// Where audit events go, as lines of JSON [default: stderr]
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Print a new token once, and its hash for the access file
    #[command(after_help = "Example:\n  palisade serve token billing")]
    Token {
        /// The name of the principal
        name: String,
    },
}

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// The answer; its field names are the command's contract.
#[derive(Serialize)]
struct Token {
    name: String,
    token: String,
    token_sha256: String,
}

/// What the kernel allows, without the zero at its end.
const LONGEST_SOCKET: usize = 107;

/// Reads an address to listen at, which is not looked up.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let how = "write an IP address and a port, as in 127.0.0.1:7420 or [::1]:7420";
    text.parse().map_err(|_| how.to_owned())
}

fn config(message: String) -> Failure {
    Error::new(ErrorKind::Config, "serve", message).into()
}

impl Serve {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        if let Some(What::Token { name }) = self.what {
            Name::new(&name)?;
            let (token, token_sha256) = new_token();
            let answer = Token {
                name,
                token,
                token_sha256,
            };
            return global.printer().reply(&answer, Token::text, true);
        }
        let mut endings = Endings::listen()?;
        raise_file_limit();
        let target = Target::find(global)?;
        let url = by_lease(&target)?;
        let waits_after_boot = target.info()?.options.contains(&"ends_with");
        let metrics = Metrics::install()?;
        let client = palisade::connect(&url).await?;
        let client = client.observed_by(palisade::layers::Metrics);
        let max_ttl = self
            .max_ttl
            .unwrap_or(if waits_after_boot { HOUR } else { DAY });
        if max_ttl < client.capability().ttl.min {
            let min = client.capability().ttl.min;
            return Err(config(format!(
                "--max-ttl must be at least {} on this engine",
                rounded(min)
            )));
        }
        let folder = self.socket.as_deref().and_then(Path::parent);
        let folder = folder.map_or_else(own_folder, Path::to_owned);
        let socket = self
            .socket
            .clone()
            .unwrap_or_else(|| folder.join("gateway.sock"));
        if socket.as_os_str().len() > LONGEST_SOCKET {
            let path = socket.display();
            return Err(config(format!(
                "{path}: the path of a socket has at most {LONGEST_SOCKET} bytes; name a shorter \
                 one with --socket"
            )));
        }
        let port = !self.no_port;
        let needs_token = port && self.access.is_none() && !self.insecure;
        let token = needs_token.then(|| new_token().0);
        let audit = match &self.audit {
            None => Audit::to(std::io::stderr()),
            Some(path) => Audit::to(
                append(path)
                    .map_err(|error| config(format!("audit file {}: {error}", path.display())))?,
            ),
        };
        let traces = Traces::begin(Some(global.printer()), RetryPolicy::recommended());
        let settings = Config {
            listen: port.then_some(self.listen),
            socket: Some(socket.clone()),
            access: self.access,
            token: token.clone(),
            tls: self.tls_cert.zip(self.tls_key),
            insecure: self.insecure,
            public_urls: self.public_url,
            drain: self.drain,
            limits: Limits {
                sessions: self.max_sessions.get(),
                claims: self.max_claims.get(),
                waiting: self.max_waiting.get(),
                per_peer: self.max_per_peer,
                ttl: max_ttl,
            },
            audit,
            metrics,
            tracer: traces.as_ref().map(Traces::tracer),
        };
        let gateway = Gateway::bind(client.clone(), settings).await?;
        // Only now: if another gateway is there, the file has that one's token.
        let token = match token {
            Some(token) => Some((write_token(&folder, &token)?, token)),
            None => None,
        };
        for finding in gateway.findings() {
            let (message, remedy) = (&finding.message, &finding.remedy);
            let event = json!({
                "event": "warning",
                "code": finding.code,
                "message": message,
                "remedy": remedy,
            });
            let text = || Some(format!("warning: {message}: {remedy}"));
            global.printer().event(event, text);
        }
        let file = token.as_ref().map(|(path, _)| path.display().to_string());
        let event = json!({
            "event": "serving",
            "engine": client.describe(),
            "url": gateway.url(),
            "socket": socket.display().to_string(),
            "token_file": file,
        });
        // The token is behind `#`, which a browser does not send. Only for a terminal, not for a
        // log.
        let page = token.as_ref().filter(|_| std::io::stderr().is_terminal());
        let page = page.map(|(_, token)| format!("\ndashboard: {}/#{token}", gateway.url()));
        global.printer().event(event, || {
            let token = file.map_or_else(String::new, |file| format!(", token in {file}"));
            let socket = shown(&socket.display().to_string());
            Some(format!(
                "serving {} at {} and {socket}{token}{}",
                client.describe(),
                gateway.url(),
                page.unwrap_or_default()
            ))
        });
        let (ending, ended) = oneshot::channel();
        let now = async {
            endings.next().await;
            let _ = ending.send(());
            endings.next().await;
        };
        let end = async {
            let _ = ended.await;
        };
        let stay = gateway.serve_until(end, now).await;
        if let Some((path, _)) = token {
            // The token is no longer valid.
            let _ = std::fs::remove_file(path);
        }
        if !stay.is_empty() {
            let event = json!({"event": "ended_at_once", "holds": stay});
            global.printer().event(event, || Some(staying(&stay)));
            // Nothing is dropped: that would release the holds, which their clients rely on.
            at_once(&Ok(Outcome::Done));
        }
        client.close().await;
        if let Some(traces) = traces {
            traces.end();
        }
        Ok(Outcome::Done)
    }
}

impl Token {
    fn text(&self) -> String {
        format!(
            "# The token, shown only now:\n# {}\n[[principal]]\nname = {:?}\ntoken_sha256 = {:?}\n\
             use = []\nsee = []\noperate = []\n",
            self.token,
            shown(&self.name),
            self.token_sha256
        )
    }
}

/// The URL, with the option that lets holds outlive the gateway's process until their leases end,
/// if the engine needs one.
fn by_lease(target: &Target) -> Result<String, Failure> {
    let url = target.url();
    let asks = target.info()?.options.contains(&"ends_with");
    if !asks || Url::parse(url)?.has("ends_with") {
        return Ok(url.to_owned());
    }
    let sign = if url.contains('?') { '&' } else { '?' };
    Ok(format!("{url}{sign}ends_with=lease"))
}

/// The holds that stay when a gateway ends at once.
fn staying(stay: &[Stays]) -> String {
    let mut text = format!(
        "ended at once; {} claims stay until their leases end:",
        stay.len()
    );
    for one in stay.iter().take(STAYING_SHOWN) {
        let Stays {
            principal, until, ..
        } = one;
        text += &format!(
            "\n  {} of {} until {until}",
            shown(&one.name),
            shown(principal)
        );
    }
    if let Some(more @ 1..) = stay.len().checked_sub(STAYING_SHOWN) {
        text += &format!("\n  and {more} more");
    }
    text
}

/// Writes the token to a file that only this user can read.
fn write_token(folder: &Path, token: &str) -> Result<PathBuf, Failure> {
    let path = folder.join("gateway.token");
    private_folder(folder)?;
    let write = || {
        // A new file each time: an old one may be open elsewhere, or be a link.
        let fresh = folder.join(format!("gateway.token.{}", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&fresh)?;
        writeln!(file, "{token}")?;
        std::fs::rename(&fresh, &path)
    };
    write().map_err(|error: std::io::Error| config(format!("{}: {error}", path.display())))?;
    Ok(path)
}

/// Raises the limit on open files to its maximum: each waiting request needs one. If it can't be
/// raised, fewer connections are accepted.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum });
}

fn append(path: &Path) -> std::io::Result<std::fs::File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}
