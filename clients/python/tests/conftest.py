"""Real gateways: the built command, each with its own store or a shared one; what stands between
them and a client; and both clients behind one face."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

import palisade

ROOT = Path(__file__).resolve().parents[3]
COMMAND = os.environ.get("PALISADE_COMMAND", str(ROOT / "target/debug/palisade"))
LIMIT = 20.0

#: What every gateway with an access file knows.
TOKEN = secrets.token_hex(32)


def environment() -> dict[str, str]:
    clean = {key: text for key, text in os.environ.items() if "PALISADE" not in key}
    return {**clean, "PALISADE_CONFIG": "/dev/null"}


class Gateway:
    def __init__(
        self, url: str, socket: Path, *options: str, listen: str = "127.0.0.1:0", **more: str
    ) -> None:
        self.process = subprocess.Popen(
            [
                COMMAND, "serve", "--json", "--url", url, "--socket", str(socket),
                "--listen", listen, "--drain", "5s", *options,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), **more},
        )
        assert self.process.stderr is not None
        said = json.loads(self.process.stderr.readline())
        #: Where it listens, whatever it calls itself.
        self.url: str = said["url"] if listen.endswith(":0") else f"http://{listen}"
        self.unix = f"http+unix:{socket}"
        self.token = TOKEN
        if said.get("token_file"):
            self.token = Path(said["token_file"]).read_text().strip()
        # Audit events are read, so that a full pipe stops nothing.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        there = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=LIMIT)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        there.request(method, path, None if body is None else json.dumps(body), headers)
        answer = there.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    started: list[Gateway] = []

    def start(
        *options: str, url: str | None = None, folder: str | None = None, **more: str
    ) -> Gateway:
        at = tmp_path / (folder or f"run{len(started)}") / "gateway.sock"
        started.append(Gateway(url or f"file:{tmp_path / 'store'}", at, *options, **more))
        return started[-1]

    yield start
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.signal(signal.SIGCONT)
            gateway.kill()


@pytest.fixture
def gateway(start: Callable[[], Gateway]) -> Gateway:
    return start()


@pytest.fixture
def access(tmp_path: Path) -> Path:
    """An access file: the same token at several gateways."""
    file = tmp_path / "access.toml"
    hashed = hashlib.sha256(TOKEN.encode()).hexdigest()
    rights = 'use = [""]\nsee = [""]\noperate = [""]\n'
    file.write_text(f'[[principal]]\nname = "all"\ntoken_sha256 = "{hashed}"\n{rights}')
    return file


class Proxy:
    """Passes each request on to the gateway that ``choose`` names, and calls ``before`` and
    ``after`` with its path on the way. A stream is passed on as it comes."""

    def __init__(self) -> None:
        self.choose: Callable[[], Gateway]
        self.before: Callable[[str], None] = lambda path: None
        self.after: Callable[[str, bytes], None] = lambda path, body: None
        #: The streams that have begun.
        self.streams: list[socket.socket] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.before(self.path)
                there = proxy.choose().url.removeprefix("http://")
                onward = http.client.HTTPConnection(there, timeout=LIMIT)
                # A gateway without --public-url knows itself only by its own address.
                headers = {**self.headers, "Host": proxy.host or there}
                try:
                    onward.request(self.command, self.path, body or None, headers)
                    answer = onward.getresponse()
                    stream = answer.getheader("Content-Type") == "text/event-stream"
                    whole = b"" if stream else answer.read()
                    proxy.after(self.path, whole)
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.getheader("Content-Type") or "")
                    self.end_headers()
                    self.wfile.write(whole)
                    if stream:
                        proxy.streams.append(self.connection)
                    while stream and (part := answer.read1()):
                        self.wfile.write(part)
                except OSError:
                    self.close_connection = True

            do_GET = do_DELETE = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.host: str | None = None
        self.token = TOKEN
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def cut(self) -> None:
        """Ends the first stream, once it has begun."""
        until = time.monotonic() + LIMIT
        while not self.streams:
            assert time.monotonic() < until
            time.sleep(0.01)
        self.streams[0].shutdown(socket.SHUT_RDWR)

    def in_front_of(self, start: Callable[..., Gateway]) -> Gateway:
        """A gateway that calls itself by the proxy's address, so that nothing passes it by."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            listen = f"127.0.0.1:{free.getsockname()[1]}"
        gateway = start("--public-url", self.url, listen=listen)
        self.token = gateway.token
        self.host, self.choose = self.url.removeprefix("http://"), lambda: gateway
        return gateway


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


class BlockingHold:
    """An :class:`palisade.AsyncHold` for a test that blocks."""

    def __init__(self, client: "Blocking", hold: palisade.AsyncHold) -> None:
        self.client, self.hold, self.lost = client, hold, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hold, name)

    def wait(self, seconds: float) -> bool:
        async def told() -> bool:
            try:
                await asyncio.wait_for(self.hold.lost.wait(), seconds)
            except asyncio.TimeoutError:
                pass
            return self.hold.lost.is_set()

        return bool(self.client.run(told()))

    def release(self) -> None:
        self.client.run(self.hold.release())


class Blocking:
    """An :class:`palisade.AsyncClient` in a loop of its own, for a test that blocks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

        async def make() -> palisade.AsyncClient:
            return palisade.AsyncClient(*arguments, **options)

        self.client = self.run(make())

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(3 * LIMIT)

    def lock(self, name: str, *, wait: float | None = None) -> BlockingHold:
        async def take() -> palisade.AsyncHold:
            return await self.client.lock(name, wait=wait)

        return BlockingHold(self, self.run(take()))

    def lines(self) -> Any:
        return self.run(self.client.lines())

    def __enter__(self) -> "Blocking":
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture(params=[palisade.Client, Blocking], ids=["threads", "asyncio"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Makes a client of either kind for a gateway."""

    def make(gateway: Any, **options: Any) -> Any:
        return request.param(gateway.url, token=gateway.token, **options)

    return make
