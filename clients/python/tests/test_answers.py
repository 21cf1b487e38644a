"""What is no answer of a gateway, refusals that stay, and secrets that are not shown."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pprint
import secrets
import socket
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

import palisade
from conftest import TOKEN, Gateway
from palisade import _protocol as protocol


@pytest.fixture
def stranger() -> Iterator[Any]:
    """A web server that is no gateway: answers with a status, headers and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, headers, body = server.says  # type: ignore[attr-defined]
            server.heard.append(dict(self.headers))  # type: ignore[attr-defined]
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                pass

        do_GET = do_DELETE = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url, server.token, server.heard = f"http://127.0.0.1:{server.server_port}", TOKEN, []
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "says",
    [
        (302, {"Location": "http://127.0.0.1:9/"}, b""),
        (307, {"Location": "/login"}, b"<html>"),
        (200, {}, b"<html>"),
        (201, {}, b"[1]"),
        (200, {}, b"\xff\xfe"),
        (404, {}, b"<html>"),
        (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"),
        (200, {}, b" " * (5 << 20)),
    ],
    ids=lambda says: f"{says[0]}-{len(says[2])}",
)
def test_what_is_no_gateway_is_an_error_at_once(
    make: Callable[..., Any], stranger: Any, says: tuple[int, dict[str, str], bytes]
) -> None:
    stranger.says = says
    with make(stranger) as c:
        for use in (lambda: c.lock("a", wait=5.0), c.lines):
            began = protocol.now()
            with pytest.raises(palisade.Error) as told:
                use()
            assert not isinstance(told.value, palisade.Unreachable)
            assert "is it a palisade gateway" in str(told.value)
            assert protocol.now() - began < 4.0


def test_a_balancer_without_a_gateway_is_tried_again(make: Callable[..., Any], stranger: Any) -> None:
    stranger.says = (503, {}, b"<html>")
    with make(stranger) as c, pytest.raises(palisade.Unreachable):
        c.lock("a", wait=0.5)
    assert len(stranger.heard) > 1


def test_denied_stays_denied(
    make: Callable[..., Any], start: Callable[..., Gateway], tmp_path: Path
) -> None:
    # A gateway in front of another, where it may use a part of the names only.
    token, file = secrets.token_hex(32), tmp_path / "inner.toml"
    hashed = hashlib.sha256(token.encode()).hexdigest()
    file.write_text(f'[[principal]]\nname = "outer"\ntoken_sha256 = "{hashed}"\nuse = ["x/"]\n')
    inner = start("--access", str(file))
    outer = start(url=inner.url, PALISADE_GATEWAY_TOKEN=token)
    with make(outer) as c:
        c.lock("x/a", wait=5.0).release()
        began = protocol.now()
        with pytest.raises(palisade.Error) as told:
            c.lock("y/a", wait=10.0)
        assert told.value.code == "denied" and protocol.now() - began < 8.0


def test_secrets_are_not_shown(gateway: Gateway) -> None:
    c = palisade.Client(gateway.url, token=gateway.token)
    a = palisade.AsyncClient(gateway.url, token=gateway.token)
    with c, c.lock("a") as hold:
        shown = [repr(c), repr(a), repr(hold), pprint.pformat(vars(c)), pprint.pformat(vars(hold))]
        for one in (c, a):
            shown += [repr(value) for value in vars(one).values()]
            shown += [repr(vars(value)) for value in vars(one).values() if hasattr(value, "__dict__")]
    try:
        with palisade.Client("http://127.0.0.1:9", token=gateway.token) as gone:
            gone.lock("a", wait=0.1)
    except palisade.Error as error:
        ours = traceback.TracebackException.from_exception(error, capture_locals=True)
        shown += [line for line in ours.format()]
    assert "palisade" in "".join(shown)
    assert gateway.token not in "".join(shown)
    asyncio.run(a.close())


def test_urls_are_checked_and_not_shown() -> None:
    for url in ("localhost:7420", "ftp://x", "http://", "https://me:sesame@locks", ""):
        with pytest.raises(ValueError) as told:
            palisade.Client(url)
        assert "sesame" not in str(told.value)


def test_a_session_is_followed_but_never_out_of_tls() -> None:
    for url, own, expected in [
        ("http://balancer:1", "http://one:7420", "http://one:7420"),
        ("http://balancer:1", "https://one", "https://one"),
        ("https://balancer", "https://one:7/", "https://one:7"),
        ("https://balancer", "http://one:7420", "https://balancer"),
        ("http://balancer:1", "http://me:secret@one", "http://balancer:1"),
        ("http://balancer:1", "http+unix:/s", "http://balancer:1"),
        ("http://balancer:1", "nothing", "http://balancer:1"),
        ("http://balancer:1", None, "http://balancer:1"),
        ("http+unix:/s", "http://one:7420", "http://localhost"),
    ]:
        assert protocol.followed(url, own) == expected


def test_the_owner_of_a_claim_is_this_process(make: Callable[..., Any], gateway: Gateway) -> None:
    with make(gateway, label="nightly") as c:
        hold = c.lock("a")
        holder = c.lines()[0]["holders"][0]
        assert holder["pid"] == os.getpid() != gateway.process.pid
        assert (holder["host"], holder["label"]) == (socket.gethostname(), "nightly")
        assert holder["owner"] == f"python-{os.getpid()}"
        hold.release()


def test_lines_can_be_seen_without_a_right_to_lock(
    make: Callable[..., Any], start: Callable[..., Gateway], tmp_path: Path
) -> None:
    file = tmp_path / "access.toml"
    hashed = hashlib.sha256(TOKEN.encode()).hexdigest()
    file.write_text(f'[[principal]]\nname = "viewer"\ntoken_sha256 = "{hashed}"\nsee = [""]\n')
    gateway = start("--access", str(file))
    with make(gateway) as c:
        assert c.lines() == []
        assert gateway.ask("GET", "/v1/engine?check=false")[1]["sessions"] == 0


def test_the_socket_of_this_user_is_found(
    start: Callable[..., Gateway], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "palisade").mkdir(mode=0o700)
    with palisade.Client("http+unix:") as c, pytest.raises(palisade.Unreachable):
        c.lock("a", wait=0.0)
    start(folder="palisade")
    with palisade.Client("http+unix:") as c, c.lock("a", wait=5.0) as hold:
        assert hold.valid
    (tmp_path / "palisade").chmod(0o755)
    with palisade.Client("http+unix:") as c, pytest.raises(palisade.Error, match="0700"):
        c.lock("a", wait=5.0)
