"""The clock, the settings, and the meaning of a gateway's responses.

Nothing here does I/O or changes state; `_core.py` decides what is sent and when.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable
from urllib.parse import urlsplit

import httpx

#: How often a session is kept alive in one ttl. Two may be lost before a hold is.
KEEPALIVES = 4
#: How long a request may take in addition to the time that it waits for a lock, in seconds.
REQUEST = 5.0
#: How long a lock may take in all, in addition to the time that its caller waits for it.
GRACE = 5.0
#: Each waiting request has its own connection, without a limit. Idle connections are closed soon,
#: because a middlebox may silently drop them.
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=5.0)
#: The longest answer about claims, and about lines, in bytes: a hostile server may send any.
ANSWER, SURVEY = 4 << 20, 64 << 20
#: The longest event; a gateway's have a few hundred bytes.
EVENT = 64 << 10
#: A gateway sends something on a stream of events at least every 15 s.
SILENCE = 40.0

#: The shortest time between two keep-alives, however many events ask for one.
APART = 0.1

#: The states in which a claim can't be held any more.
GONE = ("lost", "evicted", "released", "busy", "failed", "no_claim")


def now() -> float:
    """Seconds on a clock that keeps running during suspend."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Error(Exception):
    """A failure; ``code`` is the gateway's stable word for it."""

    def __init__(self, code: str, detail: str, outcome: str = "not_applied") -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.outcome = outcome

    def again(self) -> "Error":
        """The same, to be raised elsewhere."""
        return type(self)(self.code, self.detail, self.outcome)


class Busy(Error):
    """Others hold the lock, and the time to wait is over."""


class Lost(Error):
    """The hold was lost: another may have it."""


class Unreachable(Error):
    """No gateway answers, or the engine behind it does not. It may answer later."""


#: Whatever is not named here is an error that stays, and is not tried again.
KINDS: dict[str, type[Error]] = {
    "busy": Busy,
    "lost": Lost,
    "evicted": Lost,
    "released": Lost,
    "no_claim": Lost,
    "unreachable": Unreachable,
    "draining": Unreachable,
    "no_session": Unreachable,
}
#: After these codes a claim can't continue in its session: the client uses another gateway.
ELSEWHERE = ("no_session", "draining", "no_gateway")
#: The place in the line is gone, but nobody took it away: the client claims again.
AGAIN = ("lost", "no_claim")


def understood(status: int, body: bytes) -> dict[str, Any]:
    """The document of a response; raises what a refusal means."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if 200 <= status < 300 and isinstance(document, dict):
        return document
    code = document.get("code") if isinstance(document, dict) else None
    if isinstance(code, str) and status >= 400 and isinstance(document, dict):
        detail, outcome = str(document.get("detail", "")), document.get("outcome")
        return _raise(KINDS.get(code, Error)(code, detail, str(outcome or "maybe_applied")))
    if status >= 500:
        detail = f"no gateway answers; something before it says {status}"
        return _raise(Unreachable(f"http_{status}", detail, "maybe_applied"))
    # A redirect is never followed: the token would go with it.
    detail = f"the answer has status {status} and is none of a gateway's; is it a palisade gateway?"
    return _raise(Error(f"http_{status}", detail, "maybe_applied"))


def no_events(status: int, body: bytes) -> Error:
    """What an answer means that is no stream of events."""
    try:
        understood(status, body)
    except Error as error:
        return error
    return Error(f"http_{status}", "the answer is no stream of events")


def _raise(error: Error) -> dict[str, Any]:
    raise error


def unreachable(error: Exception) -> Error:
    """The exception for a missing response: the change may have been applied."""
    if isinstance(error, httpx.LocalProtocolError):
        # Its text has the header in it that can't be sent.
        return Error("config", "the request can't be sent: a header is not allowed in HTTP")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            # It would be tried again for ever, and nobody be told why.
            return Error("tls", f"the gateway's certificate is not trusted: {cause}; see verify=")
        cause = cause.__cause__ or cause.__context__
    why = f"{type(error).__name__}: {error}".rstrip(": ")
    detail = f"the gateway does not answer ({why})"
    if isinstance(error, httpx.ConnectError):
        return Unreachable("no_gateway", detail)
    return Unreachable("unreachable", detail, "maybe_applied")


def late() -> Error:
    return Unreachable("unreachable", "the gateway does not open a session in time")


def too_long(limit: int) -> Error:
    detail = f"the answer is longer than {limit >> 20} MiB; is it a palisade gateway?"
    return Error("too_long", detail, "maybe_applied")


class Secret(str):
    """A text that is sent but never shown."""

    def __repr__(self) -> str:
        return "'…'"


@dataclass(frozen=True)
class Settings:
    urls: tuple[str, ...]
    token: Secret | None
    ttl: float
    owner: str | None
    label: str | None
    verify: Any

    @staticmethod
    def make(
        url: str | Iterable[str],
        token: str | None,
        ttl: float,
        owner: str | None,
        label: str | None,
        verify: Any,
    ) -> "Settings":
        urls = tuple(checked(url) for url in ((url,) if isinstance(url, str) else url))
        if not urls:
            raise ValueError("pass the URL of a gateway")
        if ttl <= 0:
            raise ValueError("ttl is in seconds, greater than zero")
        return Settings(urls, checked_token(token), ttl, owner, label, verify)

    def headers(self) -> dict[str, str]:
        # A compressed answer could be of any length once it is read.
        headers = {"Accept-Encoding": "identity"}
        if self.token:
            headers["Authorization"] = Secret(f"Bearer {self.token}")
        return headers

    def options(self, url: str) -> dict[str, Any]:
        """The options of httpx's transport to this URL."""
        options: dict[str, Any] = {"verify": self.verify, "limits": LIMITS}
        if url.startswith("http+unix:"):
            options["uds"] = url.removeprefix("http+unix:") or own_socket()
        return options

    def owner_record(self) -> dict[str, Any]:
        """Who claims, from where: what ``palisade ls`` shows. The gateway adds the principal."""
        pid = os.getpid()
        owner = self.owner or f"python-{pid}"
        since = int(time.time() * 1000)
        return {"owner": owner, "host": socket.gethostname(), "pid": pid, "since": since}


def checked(url: str) -> str:
    """The URL of a gateway, without a slash at its end."""
    if url.startswith("http+unix:"):
        return url
    parts = urlsplit(url)
    # The URL itself is not shown: it may have a secret in it.
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a gateway's URL is http://HOST:PORT, https://HOST or http+unix:PATH")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a gateway's URL has no user or password; pass token=")
    return url.rstrip("/")


def checked_token(token: str | None) -> Secret | None:
    """The token, which is often read from a file that ends in a newline."""
    if not token:
        return None
    # The token itself is not shown.
    if not isinstance(token, str):
        raise ValueError("token is a text")
    if not (token := token.strip()):
        raise ValueError("token has only whitespace in it")
    if not all(" " <= letter <= "~" for letter in token):
        raise ValueError("token has characters in it that are not printable ASCII")
    return Secret(token)


def base(url: str) -> str:
    """What the paths of requests are added to."""
    return "http://localhost" if url.startswith("http+unix:") else url


def followed(url: str, own: Any) -> str:
    """Where the requests of a session go that was opened at ``url`` by a gateway which calls itself
    ``own``: past any load balancer, but never out of TLS. A socket has nothing in between."""
    if url.startswith("http+unix:") or not isinstance(own, str):
        return base(url)
    try:
        own = checked(own)
    except ValueError:
        return base(url)
    leaves_tls = url.startswith("https:") and not own.startswith("https:")
    return base(url) if leaves_tls or own.startswith("http+unix:") else own


def own_socket() -> str:
    """The socket of this user's own gateway, in a folder that nobody else can access."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "palisade" if runtime else Path(f"/tmp/palisade-{os.getuid()}")
    try:
        found = folder.lstat()
    except OSError as error:
        raise Unreachable("no_gateway", f"there is no gateway of this user: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Error("config", f"{folder} must be this user's alone (mode 0700)")
    return str(folder / "gateway.sock")


def seconds(text: Any, least: float) -> float:
    """A duration in an answer, which is a number of milliseconds."""
    if isinstance(text, bool) or not isinstance(text, (int, float)) or not text >= least:
        raise ValueError("no duration")
    return text / 1000


def incomplete() -> Error:
    return Error("unusable", "the gateway's answer is incomplete, or absurd", "maybe_applied")


def span(seconds: float) -> str:
    """A duration as the gateway reads it."""
    return f"{max(0, int(seconds * 1000))}ms"


def new_secret() -> Secret:
    return Secret(secrets.token_hex(32))


def new_id() -> str:
    return secrets.token_hex(16)


def exclusive() -> dict[str, Any]:
    return {"mode": "exclusive"}


def shared() -> dict[str, Any]:
    return {"mode": "shared"}


def permits(weight: int, capacity: int) -> dict[str, Any]:
    return {"mode": "permits", "weight": weight, "capacity": capacity}
