//! The HTTP client of engines that use HTTP: HTTP/1.1, without proxies, redirects and retries,
//! because the caller decides what an unknown outcome means, and with a bound on every reply.

use std::sync::Arc;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue, LOCATION};
use reqwest::{ClientBuilder, RequestBuilder, Response, StatusCode};
use rustls::{ClientConfig, RootCertStore};

use super::replies::too_large;
use super::{Asked, Tls, cause, why};
use palisade_core::engine::{config_error, unreachable};
use palisade_core::{Error, ErrorKind, Result};

/// A client builder with this TLS configuration; without one, for unencrypted connections.
///
/// # Errors
/// [`ErrorKind::Config`] when TLS can't be set up.
pub fn http_client(tls: Option<ClientConfig>) -> Result<ClientBuilder> {
    // Without a configuration reqwest would make its own, and panic if no crypto provider is set.
    // For unencrypted connections this one, which trusts no authority, is enough.
    let tls = match tls {
        Some(tls) => tls,
        None => {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| config_error("TLS can't be set up").because(error))?
                .with_root_certificates(RootCertStore::empty())
                .with_no_client_auth()
        }
    };
    Ok(reqwest::Client::builder()
        .http1_only()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .retry(reqwest::retry::never())
        .tcp_nodelay(true)
        .tls_backend_preconfigured(tls))
}

/// A client builder whose requests carry a secret, with certificates read from their files now.
/// `what` is the user's word for the secret.
///
/// # Errors
/// [`ErrorKind::Config`] when TLS can't be set up, or the secret is not valid in a header.
pub fn http_client_with(
    tls: Option<&Tls>,
    asked: &Asked,
    what: &str,
    secret: Option<(HeaderName, String)>,
) -> Result<ClientBuilder> {
    let mut headers = HeaderMap::new();
    if let Some((name, secret)) = secret {
        let unfit = |_| {
            config_error(format!(
                "the {what} contains characters that are not allowed in a header"
            ))
        };
        let mut value = HeaderValue::try_from(secret).map_err(unfit)?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    let tls = tls.map(|tls| asked.config(tls)).transpose()?;
    Ok(http_client(tls)?.default_headers(headers))
}

/// A whole reply.
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Vec<u8>,
}

/// Why there is no whole reply.
#[derive(Debug)]
pub enum Broke {
    /// The connection failed.
    Connection(reqwest::Error),
    /// It has more than this.
    TooLarge(usize),
}

impl From<reqwest::Error> for Broke {
    fn from(error: reqwest::Error) -> Self {
        Self::Connection(error)
    }
}

/// Sends a request and reads its reply, whose body has at most `most` bytes.
pub async fn ask_http(request: RequestBuilder, most: usize) -> std::result::Result<Answer, Broke> {
    let mut response = request.send().await?;
    Ok(Answer {
        status: response.status(),
        headers: std::mem::take(response.headers_mut()),
        body: body_of(response, most).await?,
    })
}

/// Reads a body of at most `most` bytes. One that announces more is not read.
pub async fn body_of(mut response: Response, most: usize) -> std::result::Result<Vec<u8>, Broke> {
    let announced = response.content_length().unwrap_or(0);
    if announced > u64::try_from(most).unwrap_or(u64::MAX) {
        return Err(Broke::TooLarge(most));
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > most {
            return Err(Broke::TooLarge(most));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The end of a message about a reply that sends us elsewhere; empty if it does not. A redirect is
/// never followed: it could take a secret to another server, or out of TLS.
pub fn redirected(status: StatusCode, headers: &HeaderMap) -> String {
    if !status.is_redirection() {
        return String::new();
    }
    let to = headers.get(LOCATION).and_then(|to| to.to_str().ok());
    let to = to.and_then(|to| reqwest::Url::parse(to).ok());
    let to = to.map(|to| to.origin().ascii_serialization());
    match to.filter(|to| to != "null") {
        Some(to) => format!(": it redirects to {to}, so name that in the URL"),
        None => ": it redirects to another path, where none of it is".to_owned(),
    }
}

/// What a server is called, where it is, and how its URL would say that it speaks TLS (`https: in
/// place of http:`).
pub struct Place<'a> {
    /// What it is called.
    pub who: &'a str,
    /// Who does not answer.
    pub nobody: &'a str,
    /// Its address.
    pub base: &'a str,
    /// How its URL would say that it speaks TLS.
    pub with_tls: &'a str,
    /// The end of a message about a connection that it closed.
    pub closed: &'a str,
}

/// The error for a request without a whole reply. `about_tls` explains a TLS failure.
pub fn broken_http(
    operation: &'static str,
    place: &Place<'_>,
    broke: &Broke,
    about_tls: impl FnOnce(&rustls::Error) -> String,
) -> Error {
    let error = match broke {
        Broke::Connection(error) => error,
        Broke::TooLarge(most) => {
            return too_large(operation, place.who, *most).maybe_applied();
        }
    };
    if let Some(tls) = cause::<rustls::Error>(error) {
        return Error::new(ErrorKind::Config, operation, about_tls(tls));
    }
    let Place { nobody, base, .. } = place;
    let connecting = error.is_connect();
    let why = why(error, connecting);
    if connecting {
        return unreachable(operation, format!("{nobody} answers at {base}{why}"));
    }
    // The first request: whoever is there may speak another protocol.
    let hint = if operation == "connect" && base.starts_with("http://") {
        format!("; if this port speaks TLS, use {}", place.with_tls)
    } else {
        String::new()
    };
    let message = format!("the connection to {base} broke{why}{hint}{}", place.closed);
    unreachable(operation, message).maybe_applied()
}

/// A client builder for servers that are no engines. If `encrypted`, it uses the given
/// certificates, or those of the system.
///
/// # Errors
/// [`ErrorKind::Config`] when TLS can't be set up.
pub fn plain_http_client(
    encrypted: bool,
    ca: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
) -> Result<ClientBuilder> {
    let tls = encrypted.then(|| Tls::of(ca, identity).client_config());
    http_client(tls.transpose()?)
}
