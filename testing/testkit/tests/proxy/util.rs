//! Minimal servers and clients, without a runtime.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use palisade_testkit::lab::proxy::{Protocol, Proxy};
use parking_lot::Mutex;

/// Longer than anything takes on a busy machine; only a failing test waits this long.
pub const LIMIT: Duration = Duration::from_secs(10);

/// How long a test waits to see that nothing comes. No test depends on this being enough: something
/// that must not come would also make a later assertion fail.
pub const QUIET: Duration = Duration::from_millis(150);

/// A server with a thread for each connection, until the test's process ends.
pub fn serve(handler: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let handler = Arc::new(handler);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let handler = handler.clone();
            std::thread::spawn(move || handler(stream));
        }
    });
    addr
}

/// Echoes everything.
pub fn echo() -> SocketAddr {
    serve(|mut stream| {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = stream.read(&mut bytes) {
            if stream.write_all(&bytes[..length]).is_err() {
                return;
            }
        }
    })
}

pub fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Waits until `done` returns `true`.
pub fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether nothing comes for a while.
pub fn quiet(stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(QUIET)).unwrap();
    let nothing = stream.peek(&mut [0]).is_err_and(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        )
    });
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    nothing
}

/// A server that speaks RESP: it numbers the requests of all connections, records their first
/// words, and answers `+NUMBER WORD`. `NOISE` makes it push a message before the reply.
pub struct Redis {
    pub addr: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Redis {
    pub fn start() -> Redis {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let log = requests.clone();
        let addr = serve(move |stream| {
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            let mut stream = stream;
            while let Ok(words) = command(&mut lines) {
                let number = {
                    let mut log = log.lock();
                    log.push(words[0].clone());
                    log.len()
                };
                if words[0] == "NOISE" {
                    let push = b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nhi\r\n";
                    stream.write_all(push).unwrap();
                }
                let reply = format!("+{number} {}\r\n", words[0]);
                if stream.write_all(reply.as_bytes()).is_err() {
                    return;
                }
            }
        });
        Redis { addr, requests }
    }

    /// A server behind a proxy.
    pub fn proxied() -> (Redis, Proxy) {
        let redis = Redis::start();
        let proxy = Proxy::start(redis.addr, Protocol::Resp).unwrap();
        (redis, proxy)
    }

    /// The same, with a client.
    pub fn asked() -> (Redis, Proxy, Asker) {
        let (redis, proxy) = Redis::proxied();
        let asker = Asker::new(proxy.addr());
        (redis, proxy, asker)
    }

    /// The first words of all requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

fn command(lines: &mut impl BufRead) -> io::Result<Vec<String>> {
    let mut line = || {
        let mut line = String::new();
        match lines.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    };
    let count: usize = line()?[1..].parse().map_err(io::Error::other)?;
    (0..count).map(|_| line().and_then(|_| line())).collect()
}

/// A client of [`Redis`].
pub struct Asker {
    pub stream: TcpStream,
    lines: BufReader<TcpStream>,
}

impl Asker {
    pub fn new(addr: SocketAddr) -> Asker {
        let stream = connect(addr);
        let lines = BufReader::new(stream.try_clone().unwrap());
        Asker { stream, lines }
    }

    pub fn send(&mut self, words: &[&str]) {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request += &format!("${}\r\n{word}\r\n", word.len());
        }
        self.stream.write_all(request.as_bytes()).unwrap();
    }

    /// The next line.
    pub fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.lines.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    pub fn ask(&mut self, words: &[&str]) -> String {
        self.send(words);
        self.line().unwrap()
    }
}
