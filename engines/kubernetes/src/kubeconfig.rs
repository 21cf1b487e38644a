//! `Target`: which API server to use, and with which identity, from kubeconfig files or from the
//! files in a pod.
//!
//! The order is that of Kubernetes' own tools: the option `kubeconfig`, `KUBECONFIG` (several files
//! joined by colons, of which the first that sets a value wins), the pod's service account, and
//! `~/.kube/config`.

use std::io;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

use super::credentials::Source;
use palisade_core::Result;
use palisade_core::engine::{Url, config_error};
use palisade_kit::{DOCUMENT, SECRET, Tls, read_at_most, read_file, unread};

/// The service account directory in a pod.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// An API server, and how to authenticate there.
#[derive(Clone)]
pub(super) struct Target {
    /// `https://host:port/path`, without a trailing slash.
    pub(super) server: String,
    /// The name in the server's certificate, if it is not the host's.
    pub(super) server_name: Option<String>,
    ca: Option<Pem>,
    identity: Option<(Pem, Pem)>,
    /// The Kubernetes namespace of the context.
    pub(super) namespace: Option<String>,
    pub(super) source: Source,
}

/// A certificate or key. Files may be rotated, so they are read for each connection.
#[derive(Clone)]
enum Pem {
    Data(Vec<u8>),
    File(PathBuf),
}

impl Pem {
    fn read(&self) -> Result<Vec<u8>> {
        match self {
            Self::Data(data) => Ok(data.clone()),
            Self::File(path) => {
                let what = "a certificate or key that the kubeconfig names";
                read_file(what, path, DOCUMENT)
            }
        }
    }

    fn take(data: Option<String>, file: Option<PathBuf>, dir: &Path) -> Result<Option<Self>> {
        match (data.filter(|data| !data.is_empty()), file) {
            (Some(data), _) => match BASE64_STANDARD.decode(data.trim()) {
                Ok(data) => Ok(Some(Self::Data(data))),
                Err(_) => Err(config_error(
                    "a certificate or key in the kubeconfig is not valid base64",
                )),
            },
            (None, Some(path)) => Ok(Some(Self::File(dir.join(path)))),
            (None, None) => Ok(None),
        }
    }
}

impl Target {
    /// Takes the options `kubeconfig`, `context` and `service_account` out of a URL, and resolves
    /// them and the environment.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](palisade_core::ErrorKind::Config) that says what is missing.
    pub(super) fn find(url: &mut Url) -> Result<Self> {
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let context = url.take("context");
        let account = url.take("service_account").map(PathBuf::from);
        if let Some(paths) = url.take("kubeconfig").or_else(|| variable("KUBECONFIG"))
            && account.is_none()
        {
            let paths: Vec<PathBuf> = std::env::split_paths(&paths).collect();
            return Self::from_files(&paths, context.as_deref());
        }
        let pod = variable("KUBERNETES_SERVICE_HOST").zip(variable("KUBERNETES_SERVICE_PORT"));
        let folder = account.clone().unwrap_or_else(|| SERVICE_ACCOUNT.into());
        match pod {
            Some((host, port)) if account.is_some() || folder.join("token").exists() => {
                Self::in_pod(&host, &port, &folder)
            }
            None if account.is_some() => Err(config_error(
                "option service_account is for pods, where KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are set",
            )),
            _ => match variable("HOME").map(|home| Path::new(&home).join(".kube/config")) {
                Some(path) if path.exists() => Self::from_files(&[path], context.as_deref()),
                _ => Err(config_error(
                    "no kubeconfig: set KUBECONFIG or option kubeconfig, or run in a pod with a service account",
                )),
            },
        }
    }

    /// The API server of the cluster that the pod is in.
    fn in_pod(host: &str, port: &str, folder: &Path) -> Result<Self> {
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let what = "the service account's file with the namespace";
        let namespace = match read_at_most(&folder.join("namespace"), SECRET) {
            Ok(text) => Some(String::from_utf8_lossy(&text).trim().to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(unread(what, SECRET, error)),
        };
        Ok(Self {
            server: format!("https://{host}:{port}"),
            server_name: None,
            ca: Some(Pem::File(folder.join("ca.crt"))),
            identity: None,
            namespace: namespace.filter(|namespace| !namespace.is_empty()),
            source: Source::File(folder.join("token")),
        })
    }

    fn from_files(paths: &[PathBuf], context: Option<&str>) -> Result<Self> {
        let mut merged = File::default();
        let mut read = 0;
        for path in paths {
            let text = match read_at_most(path, DOCUMENT) {
                Ok(text) => text,
                // As with kubectl, a missing file is skipped as long as another one exists.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(unread("a kubeconfig", DOCUMENT, error)),
            };
            let text = String::from_utf8(text)
                .map_err(|_| config_error("a kubeconfig is no text (UTF-8)"))?;
            read += 1;
            let dir = path.parent().unwrap_or(Path::new("")).to_owned();
            merged.add(File::parse(&text)?, &dir);
        }
        if read == 0 {
            return Err(config_error(
                "there is no kubeconfig where KUBECONFIG or option kubeconfig says",
            ));
        }
        merged.target(context)
    }

    /// The certificates as their files are now; `None` for a server without TLS. `identity` takes
    /// precedence over the kubeconfig's.
    pub(super) fn tls(&self, identity: Option<(Vec<u8>, Vec<u8>)>) -> Result<Option<Tls>> {
        if !self.server.starts_with("https://") {
            return Ok(None);
        }
        let ca = self.ca.as_ref().map(Pem::read).transpose()?;
        let identity = match (identity, &self.identity) {
            (Some(identity), _) => Some(identity),
            (None, Some((cert, key))) => Some((cert.read()?, key.read()?)),
            (None, None) => None,
        };
        Ok(Some(Tls::of(ca, identity)))
    }
}

/// The parts of a kubeconfig that are used here.
#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct File {
    current_context: Option<String>,
    clusters: Option<Vec<NamedCluster>>,
    users: Option<Vec<NamedUser>>,
    contexts: Option<Vec<NamedContext>>,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Option<Cluster>,
    /// The directory that its paths are relative to.
    #[serde(skip)]
    dir: PathBuf,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: Option<User>,
    #[serde(skip)]
    dir: PathBuf,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Option<Context>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: bool,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct User {
    client_certificate: Option<PathBuf>,
    client_certificate_data: Option<String>,
    client_key: Option<PathBuf>,
    client_key_data: Option<String>,
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    username: Option<String>,
    auth_provider: Option<serde::de::IgnoredAny>,
    exec: Option<Exec>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
    namespace: Option<String>,
}

/// A plugin that provides credentials, as EKS and GKE need it.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Exec {
    pub(super) api_version: String,
    pub(super) command: String,
    pub(super) args: Option<Vec<String>>,
    pub(super) env: Option<Vec<Variable>>,
    pub(super) install_hint: Option<String>,
    provide_cluster_info: bool,
    /// What the plugin is told about the cluster, if it asks.
    #[serde(skip)]
    pub(super) cluster: Option<ClusterInfo>,
}

#[derive(Clone, Deserialize)]
pub(super) struct Variable {
    pub(super) name: String,
    pub(super) value: String,
}

/// `spec.cluster` of an ExecCredential.
#[derive(Clone, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ClusterInfo {
    server: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    certificate_authority_data: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls_server_name: Option<String>,
}

impl File {
    fn parse(text: &str) -> Result<Self> {
        // The parser's own message would show the line, which may contain a secret.
        let parsed: std::result::Result<Option<Self>, _> = serde_saphyr::from_str(text);
        let parsed = parsed.map_err(|_| config_error("a kubeconfig can't be understood; `kubectl config view` shows what is wrong with it"))?;
        Ok(parsed.unwrap_or_default())
    }

    /// Merges another file, over which this one takes precedence.
    fn add(&mut self, other: Self, dir: &Path) {
        let named = other.current_context.filter(|name| !name.is_empty());
        if self.current_context.is_none() {
            self.current_context = named;
        }
        let clusters = self.clusters.get_or_insert_default();
        for mut cluster in other.clusters.unwrap_or_default() {
            cluster.dir = dir.to_owned();
            if !clusters.iter().any(|known| known.name == cluster.name) {
                clusters.push(cluster);
            }
        }
        let users = self.users.get_or_insert_default();
        for mut user in other.users.unwrap_or_default() {
            user.dir = dir.to_owned();
            if !users.iter().any(|known| known.name == user.name) {
                users.push(user);
            }
        }
        let contexts = self.contexts.get_or_insert_default();
        for context in other.contexts.unwrap_or_default() {
            if !contexts.iter().any(|known| known.name == context.name) {
                contexts.push(context);
            }
        }
    }

    fn target(self, context: Option<&str>) -> Result<Target> {
        let chosen = context.or(self.current_context.as_deref());
        let chosen = chosen.ok_or_else(|| {
            config_error("the kubeconfig has no current-context; name one with context=")
        })?;
        let contexts = self.contexts.unwrap_or_default();
        let named = contexts.into_iter().find(|named| named.name == chosen);
        let context = named.and_then(|named| named.context);
        let context = context.ok_or_else(|| {
            config_error("the kubeconfig has no such context; see `kubectl config get-contexts`")
        })?;
        let clusters = self.clusters.unwrap_or_default();
        let cluster = clusters
            .into_iter()
            .find(|named| named.name == context.cluster);
        let (cluster, dir) = cluster
            .and_then(|named| Some((named.cluster?, named.dir)))
            .ok_or_else(|| {
                config_error("the context names a cluster that the kubeconfig does not have")
            })?;
        let server = cluster.server.trim_end_matches('/').to_owned();
        if !server.starts_with("https://") && !server.starts_with("http://") {
            return Err(config_error(
                "the cluster's server in the kubeconfig is not an http or https address",
            ));
        }
        if cluster.insecure_skip_tls_verify {
            return Err(config_error(
                "the kubeconfig sets insecure-skip-tls-verify, so that anybody could answer for the API server; set certificate-authority instead",
            ));
        }
        if cluster.proxy_url.is_some_and(|proxy| !proxy.is_empty()) {
            return Err(config_error(
                "proxy-url in the kubeconfig is not supported; connect without a proxy",
            ));
        }
        let ca = Pem::take(
            cluster.certificate_authority_data,
            cluster.certificate_authority,
            &dir,
        )?;
        let server_name = cluster.tls_server_name.filter(|name| !name.is_empty());
        let users = self.users.unwrap_or_default();
        let user = users.into_iter().find(|named| named.name == context.user);
        let (user, dir) = user.map_or_else(Default::default, |named| {
            (named.user.unwrap_or_default(), named.dir)
        });
        let cert = Pem::take(user.client_certificate_data, user.client_certificate, &dir)?;
        let key = Pem::take(user.client_key_data, user.client_key, &dir)?;
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                return Err(config_error(
                    "the kubeconfig has a client certificate without its key, or a key without its certificate",
                ));
            }
        };
        let source = if let Some(mut exec) = user.exec {
            // With a slash it is a path relative to the kubeconfig, otherwise it is looked up in
            // PATH.
            if exec.command.contains('/') {
                exec.command = dir.join(&exec.command).to_string_lossy().into_owned();
            }
            if exec.provide_cluster_info {
                let ca = ca.as_ref().map(Pem::read).transpose()?;
                exec.cluster = Some(ClusterInfo {
                    server: server.clone(),
                    certificate_authority_data: ca.map(|ca| BASE64_STANDARD.encode(ca)),
                    tls_server_name: server_name.clone(),
                });
            }
            Source::Exec(exec)
        } else if let Some(path) = user.token_file {
            Source::File(dir.join(path))
        } else if let Some(token) = user.token.filter(|token| !token.is_empty()) {
            Source::Token(token)
        } else if user.username.is_some() || user.auth_provider.is_some() {
            return Err(config_error(
                "the kubeconfig's user has a password or an auth-provider, which Kubernetes no longer takes; use an exec plugin, a token or a client certificate",
            ));
        } else {
            Source::None
        };
        Ok(Target {
            server,
            server_name,
            ca,
            identity,
            namespace: context.namespace.filter(|namespace| !namespace.is_empty()),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use palisade_core::ErrorKind;

    const ONE: &str = r#"
apiVersion: v1
kind: Config
current-context: dev
clusters:
- name: dev
  cluster: {server: "https://10.0.0.1:6443/", certificate-authority: ca.crt}
- name: open
  cluster:
    insecure-skip-tls-verify: true
    server: https://10.0.0.2
contexts:
- {name: dev, context: {cluster: dev, user: dev, namespace: jobs}}
- {name: open, context: {cluster: open, user: dev}}
- {name: eks, context: {cluster: dev, user: eks}}
- {name: nobody, context: {cluster: dev, user: nobody}}
- {name: lost, context: {cluster: elsewhere, user: dev}}
users:
- name: dev
  user: {tokenFile: token}
- name: eks
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: bin/get-token
      args: [--cluster, dev]
      env: null
      interactiveMode: Never
"#;

    fn target(context: Option<&str>) -> Result<Target> {
        let mut file = File::default();
        file.add(File::parse(ONE).unwrap(), Path::new("/conf"));
        file.target(context)
    }

    #[test]
    fn a_context_names_cluster_user_and_namespace() {
        let dev = target(None).unwrap();
        assert_eq!(dev.server, "https://10.0.0.1:6443");
        assert_eq!(dev.namespace.as_deref(), Some("jobs"));
        assert!(matches!(dev.source, Source::File(path) if path == Path::new("/conf/token")));
        let Source::Exec(exec) = target(Some("eks")).unwrap().source else {
            panic!("no exec plugin");
        };
        assert_eq!(exec.command, "/conf/bin/get-token");
        assert_eq!(exec.args.unwrap(), ["--cluster", "dev"]);
        assert!(matches!(
            target(Some("nobody")).unwrap().source,
            Source::None
        ));
        for (bad, word) in [
            ("open", "insecure"),
            ("lost", "cluster"),
            ("nosuch", "context"),
        ] {
            let error = target(Some(bad)).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.message().contains(word), "{error}");
        }
    }

    #[test]
    fn the_first_file_that_says_something_counts() {
        let mut file = File::default();
        let first = "contexts: [{name: dev, context: {cluster: dev, user: eks, namespace: first}}]";
        file.add(File::parse(first).unwrap(), Path::new("/first"));
        file.add(File::parse(ONE).unwrap(), Path::new("/conf"));
        file.add(
            File::parse("current-context: other\nclusters:\n").unwrap(),
            Path::new("/x"),
        );
        let target = file.target(None).unwrap();
        assert_eq!(target.namespace.as_deref(), Some("first"));
        assert!(matches!(target.source, Source::Exec(_)));
    }

    #[test]
    fn what_can_not_be_read_is_not_repeated() {
        let bad = File::parse("users: [{name: a, user: {token: hunter2}}")
            .err()
            .unwrap();
        assert!(!format!("{bad:?}").contains("hunter2"));
        assert!(File::parse("").unwrap().target(None).is_err());
    }

    #[test]
    fn a_pod_has_its_own_files() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("namespace"), "jobs\n").unwrap();
        let target = Target::in_pod("fd00::1", "443", folder.path()).unwrap();
        assert_eq!(target.server, "https://[fd00::1]:443");
        assert_eq!(target.namespace.as_deref(), Some("jobs"));
    }
}
