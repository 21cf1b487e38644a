//! The meaning of a refusal or of a failed request.
//!
//! Errors are classified by status code and `reason`, never by text. An error says whether the
//! change may have been applied, and who can help: a role or a kubeconfig needs a fix by people, an
//! unreachable server another attempt. Messages of the HTTP library are not repeated, because they
//! may contain addresses.

use reqwest::StatusCode;
use serde::Deserialize;

use palisade_core::engine::unreachable;
use palisade_core::{Error, ErrorKind};
use palisade_kit::{Answer, Broke, Place, authority_as_server, broken_http, redirected};

/// The body of a refusal. Some refusals have another form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) reason: String,
    message: String,
    details: Details,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Details {
    kind: String,
    causes: Vec<Cause>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Cause {
    reason: String,
}

impl Status {
    pub(super) fn read(body: &[u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }
}

/// The advice for a port that speaks TLS.
const WITH_TLS: &str = "https: in place of http: in the kubeconfig's server";

/// The verbs that a role needs, for messages.
const ROLE: &str = "a Role with get, create, update and watch on leases of coordination.k8s.io in this namespace (docs/engines/kubernetes.md has one)";

/// The error that a refusal is. `namespace` is Kubernetes' own.
pub(super) fn refused(
    operation: &'static str,
    code: StatusCode,
    body: &[u8],
    namespace: &str,
) -> Error {
    let status = Status::read(body);
    let caused = |reason: &str| status.details.causes.iter().any(|c| c.reason == reason);
    let (kind, message) = match code {
        StatusCode::UNAUTHORIZED => (
            ErrorKind::Denied,
            "the API server does not accept our credentials; see `kubectl auth whoami`".to_owned(),
        ),
        StatusCode::FORBIDDEN if caused("NamespaceTerminating") => (
            ErrorKind::Unusable,
            format!("the namespace {namespace} is being deleted, and takes no new Leases"),
        ),
        StatusCode::FORBIDDEN => (
            ErrorKind::Denied,
            format!("the API server denies it; give this identity {ROLE}"),
        ),
        StatusCode::NOT_FOUND if status.details.kind == "namespaces" => (
            ErrorKind::Config,
            format!("there is no namespace {namespace} in this cluster; create it, or name another in the URL"),
        ),
        StatusCode::NOT_FOUND => (
            ErrorKind::Unusable,
            "the server has no Leases (coordination.k8s.io/v1); is it a Kubernetes API server, 1.14 or newer?".to_owned(),
        ),
        StatusCode::UNPROCESSABLE_ENTITY => (
            ErrorKind::Unusable,
            "the API server refuses the Lease; a line of many permits may have outgrown the 256 KiB of annotations that an object has".to_owned(),
        ),
        code if code.is_server_error() => {
            let message = format!("the API server answers with status {}", code.as_u16());
            return unreachable(operation, message).maybe_applied();
        }
        code => {
            let text: String = status.message.chars().take(200).collect();
            let message = format!("unexpected answer of the API server: status {} {} {text:?}", code.as_u16(), status.reason);
            (ErrorKind::Unusable, message)
        }
    };
    Error::new(kind, operation, message)
}

pub(super) fn not_kubernetes(operation: &'static str) -> Error {
    let message = "the answer is none of Kubernetes'; is it an API server at this address?";
    Error::new(ErrorKind::Unusable, operation, message)
}

/// What a connection to `server` that failed means.
pub(super) fn broken(operation: &'static str, server: &str, broke: &Broke) -> Error {
    let place = Place {
        who: "the API server",
        nobody: "no API server",
        base: server,
        with_tls: WITH_TLS,
        closed: "",
    };
    broken_http(operation, &place, broke, about_tls)
}

/// The error for an answer to the greeting of `server` that no API server gives.
pub(super) fn not_greeted(server: &str, answer: &Answer) -> Error {
    let (status, plain) = (answer.status.as_u16(), server.starts_with("http://"));
    let hint = match redirected(answer.status, &answer.headers) {
        hint if !hint.is_empty() => hint,
        _ if status == 400 && plain => format!("; if this port speaks TLS, use {WITH_TLS}"),
        _ => "; is it a Kubernetes API server?".to_owned(),
    };
    let message = format!("{server} answers with status {status}{hint}");
    Error::new(ErrorKind::Unusable, "connect", message)
}

fn about_tls(error: &rustls::Error) -> String {
    use rustls::CertificateError as Bad;
    match error {
        rustls::Error::InvalidMessage(_) => {
            "the API server's port does not speak TLS; is the kubeconfig's server right?".to_owned()
        }
        rustls::Error::AlertReceived(_) => {
            "the API server refuses our certificate; renew client-certificate and client-key in the kubeconfig".to_owned()
        }
        rustls::Error::InvalidCertificate(
            Bad::NotValidForName | Bad::NotValidForNameContext { .. },
        ) => "the API server's certificate does not name this host; set tls-server-name in the kubeconfig to a name that it has".to_owned(),
        rustls::Error::InvalidCertificate(Bad::UnknownIssuer) => {
            "the API server's certificate is from an authority that is not trusted here; set certificate-authority in the kubeconfig".to_owned()
        }
        rustls::Error::InvalidCertificate(bad) if authority_as_server(bad) => {
            "the API server shows the certificate of an authority as its own; give it one that an authority has signed for it (CA:FALSE)".to_owned()
        }
        _ => format!("TLS can't be agreed on with the API server ({error}); is the kubeconfig's certificate-authority that of this cluster?"),
    }
}
