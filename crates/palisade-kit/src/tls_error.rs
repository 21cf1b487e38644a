//! Explains why a TLS connection failed: whose certificate was refused, and which option to set.
//! Only a person can fix that, so the engines report it as a configuration error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, ClientConfig, SignatureScheme};

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
    use rustls::CertificateError as Bad;
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
            _ => format!(
                "the certificate of {who} can't be used ({bad}); is tls_ca its authority, and does it name this host?"
            ),
        },
        _ => format!(
            "the TLS handshake with {who} failed ({error}); is tls_ca the authority of its certificate, and does the certificate name this host?"
        ),
    }
}

/// The message for a server that closed the connection because of our certificate or the lack of
/// one.
pub fn refuses_ours(who: &str) -> String {
    format!(
        "{who} refuses our side of TLS; if it requires a client certificate, set tls_cert and tls_key"
    )
}
