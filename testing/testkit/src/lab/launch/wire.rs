//! A few requests of each engine's protocol, by hand: enough to check that a server works and who
//! leads, without a client library.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// How long one answer may take. A stopped server never answers, and others must be asked after it.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connection to a port on loopback.
///
/// # Errors
/// If nobody listens or answers.
pub fn connect(port: u16) -> Result<TcpStream, String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let open = || {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    open().map_err(|error: std::io::Error| format!("port {port}: {error}"))
}

fn talk(port: u16, request: &[u8]) -> Result<Vec<u8>, String> {
    let mut stream = connect(port)?;
    let mut answer = Vec::new();
    stream
        .write_all(request)
        .and_then(|()| stream.read_to_end(&mut answer))
        .map_err(|error| format!("port {port}: {error}"))?;
    Ok(answer)
}

/// Sends one Redis command. Nested answers become lines, with one string or number each.
///
/// # Errors
/// If there is no answer, or the answer is an error.
pub fn redis(port: u16, command: &[&str]) -> Result<String, String> {
    let mut request = format!("*{}\r\n", command.len());
    for word in command {
        request += &format!("${}\r\n{word}\r\n", word.len());
    }
    let mut stream = connect(port)?;
    let failed = |error: std::io::Error| format!("port {port}: {error}");
    stream.write_all(request.as_bytes()).map_err(failed)?;
    let mut lines = Vec::new();
    resp(&mut BufReader::new(stream), &mut lines).map_err(failed)?;
    let answer = lines.join("\n");
    match answer.strip_prefix('-') {
        Some(refusal) => Err(refusal.to_owned()),
        None => Ok(answer),
    }
}

fn resp(from: &mut impl BufRead, lines: &mut Vec<String>) -> std::io::Result<()> {
    let mut head = String::new();
    if from.read_line(&mut head)? == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let head = head.trim_end();
    let (kind, rest) = head.split_at(head.len().min(1));
    let count = || rest.parse::<i64>().unwrap_or(-1);
    match kind {
        "*" => (0..count()).try_for_each(|_| resp(from, lines))?,
        "$" if count() < 0 => lines.push(String::new()),
        "$" => {
            let mut text = vec![0; usize::try_from(count()).unwrap_or(0) + 2];
            from.read_exact(&mut text)?;
            text.truncate(text.len() - 2);
            lines.push(String::from_utf8_lossy(&text).into_owned());
        }
        "-" => lines.push(head.to_owned()),
        _ => lines.push(rest.to_owned()),
    }
    Ok(())
}

/// Sends one HTTP request: returns the status and the body.
///
/// # Errors
/// If there is no answer.
pub fn http(port: u16, method: &str, path: &str, body: &str) -> Result<(u16, String), String> {
    // In HTTP/1.0 the body ends with the connection, and is never chunked.
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = String::from_utf8_lossy(&talk(port, request.as_bytes())?).into_owned();
    let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned());
    status
        .zip(body)
        .ok_or_else(|| format!("port {port}: no HTTP answer: {answer:?}"))
}

/// Sends one of ZooKeeper's four-letter commands.
///
/// # Errors
/// If there is no answer.
pub fn four_letters(port: u16, word: &str) -> Result<String, String> {
    talk(port, word.as_bytes()).map(|answer| String::from_utf8_lossy(&answer).into_owned())
}

/// Runs one statement on a PostgreSQL server without a password: returns the first column of its
/// rows.
///
/// # Errors
/// If there is no answer, or the answer is an error.
pub fn postgres(port: u16, user: &str, sql: &str) -> Result<Vec<String>, String> {
    let mut stream = connect(port)?;
    let failed = |error: std::io::Error| format!("port {port}: {error}");
    let hello = format!("user\0{user}\0database\0postgres\0\0");
    let mut request = message(
        None,
        &[&196_608_u32.to_be_bytes()[..], hello.as_bytes()].concat(),
    );
    request.extend(message(Some(b'Q'), format!("{sql}\0").as_bytes()));
    stream.write_all(&request).map_err(failed)?;
    let (mut rows, mut ready) = (Vec::new(), 0);
    // The server is ready for a query after the greeting, and again after the query.
    while ready < 2 {
        let mut head = [0; 5];
        stream.read_exact(&mut head).map_err(failed)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        let mut body = vec![0; usize::try_from(length).unwrap_or(4).saturating_sub(4)];
        stream.read_exact(&mut body).map_err(failed)?;
        match head[0] {
            b'Z' => ready += 1,
            b'E' => return Err(String::from_utf8_lossy(&body).replace('\0', " ")),
            // The number of columns, the length of the first, the first.
            b'D' => {
                let text = body.get(6..).unwrap_or_default();
                let length = body.get(2..6).and_then(|four| four.try_into().ok());
                let length = length.map_or(0, |four| i32::from_be_bytes(four).max(0));
                let end = text.len().min(usize::try_from(length).unwrap_or(0));
                rows.push(String::from_utf8_lossy(&text[..end]).into_owned());
            }
            _ => {}
        }
    }
    Ok(rows)
}

fn message(kind: Option<u8>, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
    let mut message: Vec<u8> = kind.into_iter().collect();
    message.extend(length.to_be_bytes());
    message.extend(body);
    message
}
