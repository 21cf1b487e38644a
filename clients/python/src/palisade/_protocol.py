"""What both clients share: the clock, the documents, and the meaning of responses.

A hold is valid until a deadline of the client's own: the time *before* the request was sent plus
the gateway's ``valid_ms``. The clock keeps running while the machine sleeps.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping

import httpx

#: How often a session is kept alive in one ttl. Two may be lost before a hold is.
KEEPALIVES = 4
#: How long a request may take in addition to the time that it waits for a lock, in seconds.
REQUEST = 5.0
#: Each waiting request has its own connection, without a limit. Idle connections are closed soon,
#: because a middlebox may silently drop them.
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=5.0)

Gone = ("lost", "evicted", "released", "busy", "failed", "no_claim")


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


class Busy(Error):
    """Others hold the lock, and the time to wait is over."""


class Lost(Error):
    """The hold was lost: another may have it."""


class Unreachable(Error):
    """No gateway answers, or the engine behind it does not."""


def failure(answer: httpx.Response) -> Error:
    """The exception for an error response."""
    try:
        problem = answer.json()
    except ValueError:
        problem = {}
    code = str(problem.get("code", f"http_{answer.status_code}"))
    detail = str(problem.get("detail", "the gateway's answer is not understood"))
    kinds: dict[str, type[Error]] = {
        "busy": Busy,
        "lost": Lost,
        "evicted": Lost,
        "released": Lost,
        "unreachable": Unreachable,
        "draining": Unreachable,
        "no_session": Unreachable,
    }
    kind = kinds.get(code, Unreachable if answer.status_code >= 500 else Error)
    if answer.status_code == 501:
        kind = Error
    return kind(code, detail, str(problem.get("outcome", "maybe_applied")))


def unreachable(error: Exception) -> Unreachable:
    """The exception for a missing response: the change may have been applied."""
    detail = f"the gateway does not answer ({type(error).__name__})"
    if isinstance(error, httpx.ConnectError):
        return Unreachable("no_gateway", detail)
    return Unreachable("unreachable", detail, "maybe_applied")


#: After these codes a claim can't continue in its session: the client uses another gateway.
ELSEWHERE = ("no_session", "draining", "no_gateway")


@dataclass(frozen=True)
class Settings:
    urls: tuple[str, ...]
    token: str | None
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
        urls = (url,) if isinstance(url, str) else tuple(url)
        if not urls:
            raise ValueError("pass the URL of a gateway")
        if ttl <= 0:
            raise ValueError("ttl is in seconds, greater than zero")
        owner = owner or f"python-{os.getpid()}"
        return Settings(urls, token, ttl, owner, label, verify)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def transport(self, url: str) -> tuple[str, dict[str, Any]]:
        """The base URL for requests, and the options of httpx's transport."""
        options: dict[str, Any] = {"verify": self.verify, "limits": LIMITS}
        if url.startswith("http+unix:"):
            options["uds"] = url.removeprefix("http+unix:")
            return "http://localhost", options
        return url.rstrip("/"), options

    def longest_wait(self) -> float:
        """The longest wait of one request: a third of the ttl, at most 50 s."""
        return min(self.ttl / 3, 50.0)


def span(seconds: float) -> str:
    """A duration as the gateway reads it."""
    return f"{max(0, int(seconds * 1000))}ms"


def new_secret() -> str:
    return secrets.token_hex(32)


def new_id() -> str:
    return secrets.token_hex(16)


@dataclass
class Claimed:
    """What a client knows about one of its claims."""

    id: str
    name: str
    token: int = 0
    claim: str = ""
    state: str = "waiting"
    deadline: float = 0.0
    value: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def learn(self, sent: float, answer: Mapping[str, Any]) -> None:
        """Applies the response to a request that was sent at ``sent``."""
        if self.is_over():
            return
        self.state = str(answer.get("state", self.state))
        self.claim = str(answer.get("claim", self.claim))
        if self.state == "held":
            self.token = int(answer["token"])
        if "valid_ms" in answer:
            # A late response to an earlier request must not shorten it.
            self.deadline = max(self.deadline, sent + answer["valid_ms"] / 1000)

    def is_over(self) -> bool:
        return self.state in Gone

    def lose(self, state: str = "lost") -> None:
        if not self.is_over():
            self.state = state

    def valid(self) -> bool:
        return self.state == "held" and now() < self.deadline

    def document(self, settings: Settings, ask: Mapping[str, Any], wait: float) -> dict[str, Any]:
        document = {
            "name": self.name,
            "id": self.id,
            "wait": span(wait),
            "queue": True,
            "owner": settings.owner,
            **ask,
        }
        if settings.label:
            document["label"] = settings.label
        if self.value is not None:
            document["value"] = self.value
        return document


def exclusive() -> dict[str, Any]:
    return {"mode": "exclusive"}


def shared() -> dict[str, Any]:
    return {"mode": "shared"}


def permits(weight: int, capacity: int) -> dict[str, Any]:
    return {"mode": "permits", "weight": weight, "capacity": capacity}
