"""What both clients share: the clock, the documents, and what an answer means.

A hold is believed in until a deadline of the client's own: the time *before* the request was sent
plus the gateway's ``valid_ms``. The clock runs on while the machine sleeps.
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
#: What a request may take beside what it waits for.
REQUEST = 5.0
#: Waiting requests have a connection each, however many there are. One that is idle may be
#: forgotten by what is in between.
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=5.0)

Gone = ("lost", "evicted", "released", "busy", "failed", "no_claim")


def now() -> float:
    """Seconds on the clock that runs on in suspend."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Error(Exception):
    """Something went wrong; ``code`` is the gateway's stable word for it."""

    def __init__(self, code: str, detail: str, outcome: str = "not_applied") -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.outcome = outcome


class Busy(Error):
    """Others hold it, and the wait is over."""


class Lost(Error):
    """The hold was lost: another may have it."""


class Unreachable(Error):
    """No gateway answers, or the engine behind it does not."""


def failure(answer: httpx.Response) -> Error:
    """The error that a refusal stands for."""
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
    """No answer: the change may be in force."""
    detail = f"the gateway does not answer ({type(error).__name__})"
    if isinstance(error, httpx.ConnectError):
        return Unreachable("no_gateway", detail)
    return Unreachable("unreachable", detail, "maybe_applied")


#: After these a claim can't go on in its session: another gateway is asked.
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
            raise ValueError("give the URL of a gateway")
        if ttl <= 0:
            raise ValueError("ttl is in seconds, greater than zero")
        owner = owner or f"python-{os.getpid()}"
        return Settings(urls, token, ttl, owner, label, verify)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def transport(self, url: str) -> tuple[str, dict[str, Any]]:
        """Where to send requests, and what httpx's transport needs for it."""
        options: dict[str, Any] = {"verify": self.verify, "limits": LIMITS}
        if url.startswith("http+unix:"):
            options["uds"] = url.removeprefix("http+unix:")
            return "http://localhost", options
        return url.rstrip("/"), options

    def longest_wait(self) -> float:
        """What one request may wait for: a third of the ttl."""
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
    """What a client knows of a claim of its own."""

    id: str
    name: str
    token: int = 0
    claim: str = ""
    state: str = "waiting"
    deadline: float = 0.0
    value: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def learn(self, sent: float, answer: Mapping[str, Any]) -> None:
        """Takes what an answer says, to a request that was sent at ``sent``."""
        if self.is_over():
            return
        self.state = str(answer.get("state", self.state))
        self.claim = str(answer.get("claim", self.claim))
        if self.state == "held":
            self.token = int(answer["token"])
        if "valid_ms" in answer:
            # A late answer to an early request never shortens it.
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
