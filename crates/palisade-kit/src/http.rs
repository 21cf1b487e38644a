//! The HTTP client of engines that use HTTP: HTTP/1.1, without proxies, redirects and retries,
//! because the caller decides what an unknown outcome means.

use std::sync::Arc;

use reqwest::ClientBuilder;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use rustls::{ClientConfig, RootCertStore};

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

/// The error for a failed connection to `place`, where `nobody` answers. `about_tls` explains a TLS
/// failure.
pub fn broken_http(
    operation: &'static str,
    (nobody, place): (&str, &str),
    error: &reqwest::Error,
    about_tls: impl FnOnce(&rustls::Error) -> String,
) -> Error {
    if let Some(tls) = cause::<rustls::Error>(error) {
        return Error::new(ErrorKind::Config, operation, about_tls(tls));
    }
    let connecting = error.is_connect();
    let why = why(error, connecting);
    if connecting {
        return unreachable(operation, format!("{nobody} answers at {place}{why}"));
    }
    unreachable(operation, format!("the connection to {place} broke{why}")).maybe_applied()
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
