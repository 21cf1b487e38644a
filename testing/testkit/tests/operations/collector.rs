//! A collector of spans, which is a real one as far as the protocol goes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use palisade_testkit::lab::launch;
use parking_lot::Mutex;
use prost::Message;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use crate::webdriver::LIMIT;

pub(crate) const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
pub(crate) const PARENT: &str = "b7ad6b7169203331";

/// Takes what is sent to `/v1/traces`.
pub(crate) struct Collector {
    pub(crate) url: String,
    pub(crate) got: Arc<Mutex<Vec<Batch>>>,
}

pub(crate) struct Batch {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    pub(crate) request: ExportTraceServiceRequest,
}

impl Collector {
    pub(crate) fn start() -> Self {
        Self::taking("http", |stream| Some(take(stream)))
    }

    /// One that speaks TLS with who shows a certificate, by those in this folder.
    pub(crate) fn start_tls(certificates: &Path) -> Self {
        let pem = |name: &str| CertificateDer::from_pem_file(certificates.join(name)).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(pem("ca.pem")).unwrap();
        let (roots, ours) = (Arc::new(roots), Arc::clone(&provider));
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, ours);
        let key = PrivateKeyDer::from_pem_file(certificates.join("server.key")).unwrap();
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier.build().unwrap())
            .with_single_cert(vec![pem("server.pem")], key);
        let config = Arc::new(config.unwrap());
        Self::taking("https", move |mut stream| {
            let mut tls = ServerConnection::new(Arc::clone(&config)).unwrap();
            // Who shows no certificate is gone.
            while tls.is_handshaking() {
                tls.complete_io(&mut stream).ok()?;
            }
            Some(take(StreamOwned::new(tls, stream)))
        })
    }

    fn taking(scheme: &str, take: impl Fn(TcpStream) -> Option<Batch> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("{scheme}://{}", listener.local_addr().unwrap());
        let got: Arc<Mutex<Vec<Batch>>> = Arc::default();
        let takes = Arc::clone(&got);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let batch = take(stream.unwrap());
                takes.lock().extend(batch);
            }
        });
        Self { url, got }
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let got = self.got.lock();
        let resources = got.iter().flat_map(|batch| &batch.request.resource_spans);
        let scopes = resources.flat_map(|resource| &resource.scope_spans);
        scopes.flat_map(|scope| scope.spans.clone()).collect()
    }

    /// The span of this name whose attribute is so.
    #[track_caller]
    pub(crate) fn span(&self, name: &str, (key, value): (&str, &str)) -> Span {
        let look = || {
            let mut spans = self.spans().into_iter();
            let found = spans.find(|it| it.name == name && text(it, key) == value);
            found.ok_or_else(|| format!("{name} among {:#?}", self.spans()))
        };
        launch::until(LIMIT, look).unwrap()
    }
}

fn take(mut stream: impl Read + Write) -> Batch {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    let (head, body) = loop {
        let count = stream.read(&mut part).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&part[..count]);
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            continue;
        };
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.unwrap().parse().unwrap();
        if bytes.len() >= end + 4 + length {
            break (head, bytes[end + 4..].to_vec());
        }
    };
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n\
                  content-length: 0\r\nconnection: close\r\n\r\n";
    stream.write_all(answer.as_bytes()).unwrap();
    let request = ExportTraceServiceRequest::decode(&*body).unwrap();
    Batch {
        head,
        body,
        request,
    }
}

/// An attribute as text; empty where there is none.
pub(crate) fn text(span: &Span, key: &str) -> String {
    let mut attributes = span.attributes.iter();
    let found = attributes.find(|attribute| attribute.key == key);
    let value = found.and_then(|attribute| attribute.value.clone()?.value);
    match value {
        Some(Any::StringValue(text)) => text,
        Some(Any::IntValue(number)) => number.to_string(),
        _ => String::new(),
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
