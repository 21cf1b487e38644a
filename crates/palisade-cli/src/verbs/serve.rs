//! `palisade serve`: a gateway in front of the engine, for who has HTTP and not palisade.
//!
//! What may come in is decided in `palisade-gateway`; here are the flags, the token of the port,
//! which only this user may read, and the signals that end it.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use opentelemetry_otlp::RetryPolicy;
use palisade::command::{own_folder, parse_duration};
use palisade::engine::Url;
use palisade::{Error, ErrorKind};
use palisade_gateway::{Audit, Config, Gateway, Limits, Metrics, new_token, private_folder};
use serde::Serialize;
use serde_json::json;

use crate::args::Global;
use crate::connect::Target;
use crate::exit::{Failure, Outcome, Verdict};
use crate::signals::Endings;
use crate::traces::Traces;
use crate::view::shown;

/// Serve the engine's locks over HTTP
///
/// This user's programs reach it by a socket without a token, and by a port of this machine with
/// the token in a file beside the socket. Elsewhere it needs TLS and an access file.
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
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7420")]
    listen: SocketAddr,
    /// Listen at the socket alone
    #[arg(long)]
    no_port: bool,
    /// The socket to listen at [default: gateway.sock in $XDG_RUNTIME_DIR/palisade, or in
    /// /tmp/palisade-UID]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Who may do what, as TOML; see docs/gateway.md
    #[arg(long, value_name = "FILE")]
    access: Option<PathBuf>,
    /// The certificate chain, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Ask for neither TLS nor a token: something in front of the gateway sees to both
    #[arg(long)]
    insecure: bool,
    /// What clients call the gateway, such as `https://locks.example.com`; repeatable, and the first
    /// is where sessions are told to stay
    #[arg(long, value_name = "URL")]
    public_url: Vec<String>,
    /// How long sessions are kept after a signal to end
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "60s")]
    drain: Duration,
    /// Sessions that one principal may have
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    max_sessions: usize,
    /// Claims that one principal may have
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    max_claims: usize,
    /// Requests of one principal that may wait
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    max_waiting: usize,
    /// Where audit events go, as lines of JSON [default: stderr]
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Print a new token once, and what the access file has of it
    #[command(after_help = "Example:\n  palisade serve token billing")]
    Token {
        /// The name of the principal
        name: String,
    },
}

/// The answer; its field names are the command's contract.
#[derive(Serialize)]
struct Token {
    name: String,
    token: String,
    token_sha256: String,
}

fn config(message: String) -> Failure {
    Error::new(ErrorKind::Config, "serve", message).into()
}

impl Serve {
    pub(crate) async fn run(self, global: &Global) -> Verdict {
        if let Some(What::Token { name }) = self.what {
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
        let url = by_lease(&Target::find(global)?)?;
        let metrics = Metrics::install()?;
        let client = palisade::connect(&url).await?;
        let client = client.observed_by(palisade::layers::Metrics);
        let folder = self.socket.as_deref().and_then(Path::parent);
        let folder = folder.map_or_else(own_folder, Path::to_owned);
        let socket = self
            .socket
            .clone()
            .unwrap_or_else(|| folder.join("gateway.sock"));
        let port = !self.no_port;
        let token = if port && self.access.is_none() && !self.insecure {
            Some(write_token(&folder)?)
        } else {
            None
        };
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
            token: token.as_ref().map(|(token, _)| token.clone()),
            tls: self.tls_cert.zip(self.tls_key),
            insecure: self.insecure,
            public_urls: self.public_url,
            drain: self.drain,
            limits: Limits {
                sessions: self.max_sessions,
                claims: self.max_claims,
                waiting: self.max_waiting,
            },
            audit,
            metrics,
            tracer: traces.as_ref().map(Traces::tracer),
        };
        let gateway = Gateway::bind(client.clone(), settings).await?;
        let file = token.as_ref().map(|(_, path)| path.display().to_string());
        let event = json!({
            "event": "serving",
            "engine": client.describe(),
            "url": gateway.url(),
            "socket": socket.display().to_string(),
            "token_file": file,
        });
        // With the token behind `#`, which a browser sends nowhere; for a person who looks, and
        // not for a log.
        let page = token.as_ref().filter(|_| std::io::stderr().is_terminal());
        let page = page.map(|(token, _)| format!("\ndashboard: {}/#{token}", gateway.url()));
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
        let end = async {
            endings.next().await;
        };
        gateway.serve(end).await;
        if let Some((_, path)) = token {
            // It opens nothing any more.
            let _ = std::fs::remove_file(path);
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

/// The URL, with holds that outlive the gateway's process until their leases end, where the
/// engine has to be asked for that.
fn by_lease(target: &Target) -> Result<String, Failure> {
    let url = target.url();
    let asks = target.info()?.options.contains(&"ends_with");
    if !asks || Url::parse(url)?.has("ends_with") {
        return Ok(url.to_owned());
    }
    let sign = if url.contains('?') { '&' } else { '?' };
    Ok(format!("{url}{sign}ends_with=lease"))
}

/// Makes a token, and a file with it that only this user can read.
fn write_token(folder: &Path) -> Result<(String, PathBuf), Failure> {
    let (token, _) = new_token();
    let path = folder.join("gateway.token");
    private_folder(folder)?;
    let write = || {
        // A new file each time: an old one may be open elsewhere, or a link.
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
    Ok((token, path))
}

/// Takes as many descriptors as this process may have: a waiting request has one. Fewer
/// connections are taken where it can't be raised.
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
