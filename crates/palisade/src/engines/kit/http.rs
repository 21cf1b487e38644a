//! The HTTP client of engines that use HTTP: HTTP/1.1, without proxies, redirects and retries,
//! because the caller decides what an unknown outcome means.

use std::sync::Arc;

use reqwest::ClientBuilder;
use rustls::{ClientConfig, RootCertStore};

use super::Tls;
use crate::core::error::{Error, ErrorKind, Result};

/// A client builder with this TLS configuration; without one, for unencrypted connections.
///
/// # Errors
/// [`ErrorKind::Config`] when TLS can't be set up.
pub(crate) fn http_client(tls: Option<ClientConfig>) -> Result<ClientBuilder> {
    // Without a configuration reqwest would make its own, and panic if no crypto provider is set.
    // For unencrypted connections this one, which trusts no authority, is enough.
    let tls = match tls {
        Some(tls) => tls,
        None => {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| {
                    Error::new(ErrorKind::Config, "connect", "TLS can't be set up").because(error)
                })?
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
