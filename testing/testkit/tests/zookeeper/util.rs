//! Shared by the tests: a raw client of ZooKeeper, and started servers.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use palisade_testkit::lab::launch::Running;
use palisade_testkit::lab::proxy::{Protocol, Proxy};
pub(crate) use palisade_testkit::lab::trial::{
    beside_others, claim, connected, cycle, soon, until, uuid,
};

/// A proxy before a node, and a URL through it.
pub(crate) fn proxied(running: &Running, node: usize) -> (Proxy, String) {
    let port = running.nodes()[node].port();
    let proxy = Proxy::start(([127, 0, 0, 1], port).into(), Protocol::ZooKeeper).unwrap();
    let url = format!("zookeeper://{}", proxy.addr());
    (proxy, url)
}

/// A separate session, with a hand-written protocol.
pub(crate) struct Raw {
    stream: TcpStream,
    pub(crate) session: i64,
}

impl Raw {
    pub(crate) fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let mut raw = Self { stream, session: 0 };
        let mut hello = [0; 4 + 8].to_vec();
        hello.extend(30_000_i32.to_be_bytes());
        hello.extend([0; 8]);
        hello.extend(bytes(&[0; 16]));
        hello.push(0);
        let answer = raw.exchange(&hello);
        raw.session = i64::from_be_bytes(answer[8..16].try_into().unwrap());
        raw
    }

    fn exchange(&mut self, packet: &[u8]) -> Vec<u8> {
        self.stream.write_all(&bytes(packet)).unwrap();
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        self.stream.read_exact(&mut answer).unwrap();
        answer
    }

    /// Runs an operation: returns the content of its answer, or the error.
    fn call(&mut self, operation: i32, record: &[u8]) -> Result<Vec<u8>, i32> {
        let header = [1_i32.to_be_bytes(), operation.to_be_bytes()].concat();
        let answer = self.exchange(&[&header, record].concat());
        match i32::from_be_bytes(answer[12..16].try_into().unwrap()) {
            0 => Ok(answer[16..].to_vec()),
            error => Err(error),
        }
    }

    /// Creates a node that everybody may change: `flags` 0 for a persistent one, 1 for an ephemeral
    /// one, 3 for an ephemeral and sequential one.
    pub(crate) fn create(&mut self, path: &str, flags: i32) -> Result<String, i32> {
        let record = [
            &bytes(path.as_bytes())[..],
            &bytes(b""),
            &anyone(31),
            &flags.to_be_bytes(),
        ];
        let made = self.call(1, &record.concat())?;
        Ok(String::from_utf8(made[4..].to_vec()).unwrap())
    }

    /// Lets everybody do what the bits of `rights` say: 1 read, 2 write, 4 create, 8 delete, 16
    /// change this.
    pub(crate) fn allow(&mut self, path: &str, rights: i32) -> Result<(), i32> {
        let (path, version) = (bytes(path.as_bytes()), (-1_i32).to_be_bytes());
        let record = [&path[..], &anyone(rights), &version].concat();
        self.call(7, &record).map(drop)
    }

    /// How many nodes are below one; needs no right to read it.
    pub(crate) fn count(&mut self, path: &str) -> i32 {
        let stat = self.call(3, &[&bytes(path.as_bytes())[..], &[0]].concat());
        stat.map_or(0, |stat| {
            i32::from_be_bytes(stat[56..60].try_into().unwrap())
        })
    }

    pub(crate) fn set(&mut self, path: &str, data: &[u8]) -> Result<(), i32> {
        let (path, data) = (bytes(path.as_bytes()), bytes(data));
        let record = [&path[..], &data, &(-1_i32).to_be_bytes()].concat();
        self.call(5, &record).map(drop)
    }

    pub(crate) fn get(&mut self, path: &str) -> Result<Vec<u8>, i32> {
        let read = self.call(4, &[&bytes(path.as_bytes())[..], &[0]].concat())?;
        let (length, rest) = read.split_first_chunk::<4>().unwrap();
        Ok(rest[..u32::from_be_bytes(*length) as usize].to_vec())
    }

    pub(crate) fn delete(&mut self, path: &str) -> Result<(), i32> {
        let record = [&bytes(path.as_bytes())[..], &(-1_i32).to_be_bytes()].concat();
        self.call(2, &record).map(drop)
    }

    /// Whether a multi with only this check is applied.
    pub(crate) fn check(&mut self, path: &str, version: i32) -> bool {
        let record = [
            &13_i32.to_be_bytes()[..],
            &[0],
            &(-1_i32).to_be_bytes(),
            &bytes(path.as_bytes()),
            &version.to_be_bytes(),
            &(-1_i32).to_be_bytes(),
            &[1],
            &(-1_i32).to_be_bytes(),
        ];
        let answer = self.call(14, &record.concat());
        answer.is_ok_and(|answer| i32::from_be_bytes(answer[..4].try_into().unwrap()) == 13)
    }

    /// The children of a node; empty if it does not exist.
    pub(crate) fn children(&mut self, path: &str) -> Vec<String> {
        let path = bytes(path.as_bytes());
        self.call(9, &path).unwrap();
        let Ok(listed) = self.call(8, &[&path[..], &[0]].concat()) else {
            return Vec::new();
        };
        let mut rest = &listed[4..];
        let mut names = Vec::new();
        while let Some((length, tail)) = rest.split_first_chunk::<4>() {
            let (name, tail) = tail.split_at(u32::from_be_bytes(*length) as usize);
            names.push(String::from_utf8(name.to_vec()).unwrap());
            rest = tail;
        }
        names
    }

    /// Removes a node and everything below it.
    pub(crate) fn delete_all(&mut self, path: &str) {
        for name in self.children(path) {
            self.delete_all(&format!("{path}/{name}"));
        }
        let _ = self.delete(path);
    }
}

fn bytes(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as i32).to_be_bytes(), bytes].concat()
}

/// An ACL that gives everybody these rights.
fn anyone(rights: i32) -> Vec<u8> {
    let (one, rights) = (1_i32.to_be_bytes(), rights.to_be_bytes());
    [&one[..], &rights, &bytes(b"world"), &bytes(b"anyone")].concat()
}
