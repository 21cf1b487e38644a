//! Explains why a TLS connection failed: whose certificate was refused, and which option to set.
//! Only a person can fix that, so the engines report it as a configuration error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, CertificateError, ClientConfig, SignatureScheme};

use super::tls::Tls;
use palisade_core::engine::config_error;
use palisade_core::{Error, ErrorKind, Result};

/// Whether a server asks for a client certificate that we don't have, and has never answered
/// without one.
///
/// In TLS 1.3 the client's handshake completes before the server refuses it, and the server's alert
/// is lost if the close of the connection overtakes it. Then a plain disconnect has the same
/// meaning.
#[derive(Debug, Clone, Default)]
pub struct Asked(Arc<State>);

#[derive(Debug, Default)]
struct State {
    asked: AtomicBool,
    served: AtomicBool,
}

impl Asked {
    /// A configuration with certificates read from their files now, whose connections are observed.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] when a file can't be used.
    pub fn config(&self, tls: &Tls) -> Result<ClientConfig> {
        let mut config = tls.fresh()?.client_config()?;
        self.watch(&mut config);
        Ok(config)
    }

    /// Observes connections that are made with `config`.
    pub fn watch(&self, config: &mut ClientConfig) {
        if !config.client_auth_cert_resolver.has_certs() {
            config.client_auth_cert_resolver = Arc::new(self.clone());
        }
    }

    /// Records that a server answered, so it does not require a certificate.
    pub fn served(&self) {
        self.0.served.store(true, Ordering::Relaxed);
    }

    /// The error for a failed connection to `who`, which has changed nothing.
    pub fn judge(&self, who: &str, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Unreachable if self.in_vain() => config_error(refuses_ours(who)),
            _ => error.not_applied(),
        }
    }

    /// Whether the server asked for a certificate and was given none.
    pub fn in_vain(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed) && !self.0.served.load(Ordering::Relaxed)
    }
}

impl ResolvesClientCert for Asked {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.asked.store(true, Ordering::Relaxed);
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// Explains `error` of a server called `who`, whose scheme without TLS is `plain`.
pub fn about_tls(who: &str, plain: &str, error: &rustls::Error) -> String {
    use CertificateError as Bad;
    match error {
        rustls::Error::InvalidMessage(_) => format!(
            "this port of {who} does not speak TLS; use {plain}: in place of {plain}s:, or the port for TLS"
        ),
        rustls::Error::AlertReceived(AlertDescription::CertificateExpired) => {
            format!(
                "{who} refuses our certificate: it has expired; renew the one that tls_cert names"
            )
        }
        rustls::Error::AlertReceived(_) => refuses_ours(who),
        rustls::Error::InvalidCertificate(bad) => match bad {
            Bad::Expired | Bad::ExpiredContext { .. } => format!(
                "the certificate of {who} has expired; renew it there, or correct this machine's clock"
            ),
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => format!(
                "the certificate of {who} is not valid yet; compare this machine's clock with the server's"
            ),
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => format!(
                "the certificate of {who} does not name this host; connect by a name in it, or give the server a certificate that names it"
            ),
            Bad::UnknownIssuer => format!(
                "the certificate of {who} is from an authority that is not trusted here; name its authority with tls_ca"
            ),
            bad if authority_as_server(bad) => format!(
                "the certificate of {who} is an authority's (CA:TRUE), which no server may show as its own; give the server one that an authority has signed, or a self-signed one with -addext basicConstraints=critical,CA:FALSE"
            ),
            Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => format!(
                "the certificate of {who} is not for servers; give the server one whose extendedKeyUsage has serverAuth"
            ),
            Bad::BadSignature => format!(
                "the certificate of {who} is not signed by the authority that tls_ca names, though it has the same name; is the authority's certificate an old one?"
            ),
            Bad::Revoked => format!("the certificate of {who} is revoked; give the server another"),
            Bad::BadEncoding | Bad::UnhandledCriticalExtension => format!(
                "the certificate of {who} can't be read; give the server one in X.509 version 3"
            ),
            _ => format!(
                "the certificate of {who} can't be used; is tls_ca its authority, does it name this host, and is its key of a usual kind?"
            ),
        },
        _ => format!(
            "the TLS handshake with {who} failed ({error}); is tls_ca the authority of its certificate, and does the certificate name this host?"
        ),
    }
}

/// Whether a server shows the certificate of an authority as its own, as it does with what
/// `openssl req -x509` makes by default. The library has no name for it.
pub fn authority_as_server(bad: &CertificateError) -> bool {
    format!("{bad:?}").contains("CaUsedAsEndEntity")
}

/// The message for a server that closed the connection because of our certificate or the lack of
/// one.
pub fn refuses_ours(who: &str) -> String {
    format!(
        "{who} refuses our side of TLS; if it requires a client certificate, set tls_cert and tls_key"
    )
}
