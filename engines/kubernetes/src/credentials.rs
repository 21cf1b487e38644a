//! `Credentials`: the current identity for requests.
//!
//! A token file is read again every minute, because the kubelet replaces it, and at once when the
//! server rejects the token. A plugin is run again in the background a little before its credential
//! expires, and at once when the server rejects that. Credentials are never shown.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::sync::Mutex as AsyncMutex;

use super::kubeconfig::Exec;
use super::lease::{parse_time, wall_clock};
use palisade_core::engine::config_error;
use palisade_core::{BootTime, Result};
use palisade_kit::{DOCUMENT, SECRET, read_text};

/// How long a token is used before its file is read again: client-go's interval.
const REREAD: Duration = Duration::from_secs(60);

/// The time limit for a plugin, which may have to ask a cloud service.
const PLUGIN: Duration = Duration::from_secs(30);

/// How long before its expiry a credential is replaced, in microseconds.
const EARLY: i64 = 60_000_000;

/// The source of credentials.
#[derive(Clone)]
pub(super) enum Source {
    None,
    /// A secret.
    Token(String),
    File(PathBuf),
    Exec(Exec),
}

/// The credential of a request. All of it is secret.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Credential {
    pub(super) token: Option<String>,
    /// Certificate and key in PEM.
    pub(super) identity: Option<(Vec<u8>, Vec<u8>)>,
    /// Microseconds of Unix time.
    expires: Option<i64>,
}

pub(super) struct Credentials {
    source: Source,
    /// The last one, and when to look for another.
    current: Mutex<Option<(Arc<Credential>, BootTime)>>,
    refreshing: AsyncMutex<()>,
}

impl Credentials {
    pub(super) fn new(source: Source) -> Arc<Self> {
        Arc::new(Self {
            source,
            current: Mutex::default(),
            refreshing: AsyncMutex::default(),
        })
    }

    /// The last credential, unless it is time to look for another.
    pub(super) fn fresh(&self) -> Option<Arc<Credential>> {
        self.current
            .lock()
            .as_ref()
            .filter(|(_, until)| !until.has_passed())
            .map(|(known, _)| Arc::clone(known))
    }

    /// The credential for a request now.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) when there is none and the file or plugin gives none.
    pub(super) async fn get(self: &Arc<Self>) -> Result<Arc<Credential>> {
        if let Some(fresh) = self.fresh() {
            return Ok(fresh);
        }
        let known = self.current.lock().clone();
        let Some((known, _)) = known else {
            return self.refreshed(None).await;
        };
        let ended = known.expires.is_some_and(|end| end <= wall_clock());
        match &self.source {
            _ if ended => self.refreshed(Some(known)).await,
            Source::Exec(_) => {
                drop(tokio::spawn(
                    Arc::clone(self).refresh(Some(Arc::clone(&known))),
                ));
                Ok(known)
            }
            // The old token is better than none: the kubelet may be replacing the file right now.
            _ => {
                let refreshed = self.refreshed(Some(Arc::clone(&known))).await;
                Ok(refreshed.unwrap_or(known))
            }
        }
    }

    /// Another credential to replace `old`, which the server rejects; `None` when there is no
    /// other.
    pub(super) async fn instead_of(
        self: &Arc<Self>,
        old: &Arc<Credential>,
    ) -> Option<Arc<Credential>> {
        let new = self.refreshed(Some(Arc::clone(old))).await.ok()?;
        (*new != **old).then_some(new)
    }

    /// Runs in a task of its own, so that it goes on for the next caller when this one gives up.
    async fn refreshed(self: &Arc<Self>, old: Option<Arc<Credential>>) -> Result<Arc<Credential>> {
        let refreshed = tokio::spawn(Arc::clone(self).refresh(old)).await;
        refreshed.unwrap_or_else(|_| Err(config_error("reading the credentials was given up")))
    }

    /// Only one caller at a time reads the file or runs the plugin; the others use its result.
    async fn refresh(self: Arc<Self>, old: Option<Arc<Credential>>) -> Result<Arc<Credential>> {
        let _one = self.refreshing.lock().await;
        if let Some((known, _)) = &*self.current.lock()
            && old.is_none_or(|old| *known != old)
        {
            return Ok(Arc::clone(known));
        }
        let asked = BootTime::now();
        let new = match &self.source {
            Source::None => Credential::default(),
            Source::Token(token) => Credential {
                token: Some(token.clone()),
                ..Credential::default()
            },
            Source::File(path) => {
                let text = read_text("the file with the token", path, SECRET)?;
                Credential {
                    token: Some(text.trim().to_owned()),
                    ..Credential::default()
                }
            }
            Source::Exec(exec) => run(exec).await?,
        };
        let fresh = match (&self.source, new.expires) {
            (Source::File(_), _) => asked + REREAD,
            (_, Some(expires)) => {
                let left = expires - EARLY - wall_clock();
                BootTime::now() + Duration::from_micros(left.try_into().unwrap_or(0))
            }
            (_, None) => BootTime::NEVER,
        };
        let new = Arc::new(new);
        *self.current.lock() = Some((Arc::clone(&new), fresh));
        Ok(new)
    }
}

/// Runs a plugin, as `client.authentication.k8s.io` specifies.
async fn run(exec: &Exec) -> Result<Credential> {
    #[derive(Deserialize)]
    struct Answer {
        status: Option<Given>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Given {
        token: Option<String>,
        client_certificate_data: Option<String>,
        client_key_data: Option<String>,
        expiration_timestamp: Option<String>,
    }
    let failed = |what: &str| {
        let hint = exec.install_hint.as_deref().unwrap_or_default().trim();
        let gap = if hint.is_empty() { "" } else { ". " };
        let message = format!(
            "the kubeconfig's exec plugin {:?} {what}{gap}{hint}",
            exec.command
        );
        config_error(message)
    };
    let mut spec = serde_json::json!({ "interactive": false });
    if let Some(cluster) = &exec.cluster {
        spec["cluster"] = serde_json::json!(cluster);
    }
    let info = serde_json::json!({
        "apiVersion": exec.api_version, "kind": "ExecCredential", "spec": spec,
    });
    let variables = exec.env.iter().flatten().map(|v| (&v.name, &v.value));
    let started = tokio::process::Command::new(&exec.command)
        .args(exec.args.iter().flatten())
        .envs(variables)
        .env("KUBERNETES_EXEC_INFO", info.to_string())
        .stdin(Stdio::null())
        // Its messages are for the person who set it up, as with kubectl.
        .stderr(Stdio::inherit())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let mut plugin = started.map_err(|error| failed("can't be run").because(error))?;
    let ended = async {
        let mut said = Vec::new();
        let most = u64::try_from(DOCUMENT).unwrap_or(u64::MAX);
        if let Some(output) = plugin.stdout.take() {
            output.take(most + 1).read_to_end(&mut said).await?;
        }
        if said.len() > DOCUMENT {
            return Ok(None);
        }
        Ok::<_, std::io::Error>(Some((plugin.wait().await?, said)))
    };
    let (status, said) = match tokio::time::timeout(PLUGIN, ended).await {
        Err(_) => return Err(failed("did not end in time")),
        Ok(Err(error)) => return Err(failed("can't be run").because(error)),
        Ok(Ok(None)) => return Err(failed("writes without end")),
        Ok(Ok(Some(ended))) => ended,
    };
    if !status.success() {
        return Err(failed("failed"));
    }
    let given = serde_json::from_slice::<Answer>(&said).ok();
    let given = given.and_then(|answer| answer.status);
    let given = given.ok_or_else(|| failed("gave no ExecCredential with a status"))?;
    let pem = |text: Option<String>| text.filter(|t| !t.is_empty()).map(String::into_bytes);
    let identity = pem(given.client_certificate_data).zip(pem(given.client_key_data));
    let token = given.token.filter(|token| !token.is_empty());
    if token.is_none() && identity.is_none() {
        return Err(failed(
            "gave neither a token nor a certificate with its key",
        ));
    }
    Ok(Credential {
        token,
        identity,
        expires: given.expiration_timestamp.as_deref().and_then(parse_time),
    })
}
