"""What both clients know: claims, sessions, holds; and the steps that the protocol is made of.

What is known of a claim only moves forward: waiting, held, over. A hold is valid until a deadline
of the client's own: the time *before* a request was sent plus the gateway's ``valid_ms``. It is
told of its end by a timer that sends nothing, by the session's events, or by a keep-alive,
whichever is first.

Sessions, claims and holds belong to one process. In a child that was forked they are void: nothing
is sent for them, and the client starts anew.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from typing import Any, Callable, Generator, Iterable, Mapping, NoReturn, TypeVar

import httpx

from . import _protocol as p

T = TypeVar("T")


class Claimed:
    """What a client knows about one of its claims."""

    def __init__(self, name: str, value: str | None = None) -> None:
        self.id = p.new_id()
        self.name = name
        self.value = value
        self.home = os.getpid()
        #: Whether it was found in another process, which may by now have any number.
        self.void = False
        self.token = 0
        self.state = "waiting"
        #: Whether the gateway has ever answered for it: a keep-alive must not overtake the claim.
        self.known = False
        self.deadline = 0.0
        # The keep-alives' thread and the one that waits learn of the same claim.
        self._lock = threading.Lock()

    def learn(self, sent: float, answer: Mapping[str, Any], ttl: float) -> None:
        """Applies the response to a request that was sent at ``sent``, which may come late. No
        promise is longer than the session's ttl."""
        try:
            state = str(answer["state"])
            token = int(str(answer["token"])) if state == "held" else 0
            until = sent + min(p.seconds(answer.get("valid_ms", 0), least=0.0), ttl)
            if token < 0 or (answer.get("id", self.id), answer.get("name", self.name)) != (
                self.id,
                self.name,
            ):
                raise ValueError("the answer is about another claim")
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise p.incomplete() from error
        with self._lock:
            self.known = True
            self._expire()
            if self.state in p.GONE:
                return
            if state in p.GONE:
                self.state = state
                return
            if state == "held":
                self.state, self.token = "held", token
            # A late `waiting` does not take the grant back, and no answer shortens a promise.
            self.deadline = max(self.deadline, until)

    def _expire(self) -> None:
        """A hold that was once past its deadline is never valid again."""
        if self.state == "held" and p.now() >= self.deadline:
            self.state = "lost"

    def lose(self, state: str) -> str:
        """Ends it, unless it is over; returns what it was."""
        with self._lock:
            self._expire()
            was = self.state
            if was not in p.GONE:
                self.state = state
            return was

    def is_over(self) -> bool:
        return self.is_foreign() or self.state in p.GONE

    def is_foreign(self) -> bool:
        """Whether another process made it, of which this one is a fork."""
        return self.void or self.home != os.getpid()

    def valid(self) -> bool:
        # Its lock may have been taken at the time of the fork, for ever.
        if self.is_foreign():
            return False
        with self._lock:
            self._expire()
            return self.state == "held"

    def document(
        self, settings: p.Settings, ask: Mapping[str, Any], wait: float
    ) -> dict[str, Any]:
        document = {
            "name": self.name,
            "id": self.id,
            "wait": p.span(wait),
            "queue": True,
            "owner": settings.owner_record(),
            **ask,
        }
        if settings.label:
            document["label"] = settings.label
        if self.value is not None:
            document["value"] = self.value
        return document


# Steps.


@dataclass
class Send:
    """A request: its answer's document, or an :class:`p.Error`."""

    #: The configured URL, whose connections are used.
    door: str
    method: str
    url: str
    session: "Session | None" = None
    body: dict[str, Any] | None = None
    query: dict[str, str] | None = None
    #: How long the gateway may wait, and how long the answer may take beyond that.
    wait: float = 0.0
    within: float = p.REQUEST
    #: The longest answer.
    limit: int = p.ANSWER
    #: Sent even if the caller is cancelled.
    shielded: bool = False

    #: The longest silence, in a stream.
    silence: float | None = None

    def request(self) -> dict[str, Any]:
        """The arguments of httpx's ``stream``."""
        silence = self.silence or self.wait + self.within
        return {
            "method": self.method,
            "url": self.url,
            "headers": {"Palisade-Session": self.session.secret} if self.session else {},
            "json": self.body,
            "params": self.query,
            "timeout": httpx.Timeout(self.within, read=silence),
        }

    def longest(self) -> float:
        """How long the whole of it may take. A survey may be long."""
        return self.wait + (2 if self.limit > p.ANSWER else 1) * self.within

    def take(self, body: bytearray, chunk: bytes) -> None:
        """Adds a part of the answer, which has an end."""
        body += chunk
        if len(body) > self.limit:
            raise p.too_long(self.limit)


@dataclass
class Open:
    """Opens a session for new claims. One is opened at a time; others wait for it, and for no
    longer than until their own time."""

    until: float | None

    def left(self) -> float | None:
        return None if self.until is None else max(0.0, self.until - p.now())


@dataclass
class Listen:
    """Reads a session's events until their stream ends."""

    session: "Session"


@dataclass
class Pause:
    seconds: float


@dataclass
class Nap:
    """Waits for an event, which is then cleared, or for a time."""

    event: Any
    seconds: float | None


class Session:
    """A session at one gateway; its claims belong to that gateway."""

    def __init__(self, state: "State", url: str) -> None:
        self.state = state
        self.url = url
        #: Where its requests go.
        self.base = p.base(url)
        self.secret = p.new_secret()
        self.ttl = state.settings.ttl
        self.claims: dict[str, Claimed] = {}
        #: Set when a keep-alive is to be sent at once.
        self.poked = state.event()
        #: When the last request that it answered was sent; it lives for a ttl from then on.
        self.heard = 0.0
        #: Its gateway does not know it any more; drains; failed last.
        self.gone = self.draining = self.avoided = False
        self.unread = b""

    def opened(self, sent: float, answer: Mapping[str, Any]) -> None:
        try:
            if "ttl_ms" in answer:
                ttl = p.seconds(answer["ttl_ms"], least=1.0)
                if ttl == float("inf"):
                    raise ValueError("no duration")
                self.ttl = min(self.ttl, ttl)
        except (ValueError, OverflowError) as error:
            raise p.incomplete() from error
        self.heard = sent
        self.base = p.followed(self.url, answer.get("url"))

    def takes(self) -> bool:
        """Whether a new claim may use it."""
        return not (self.gone or self.draining or self.avoided) and p.now() < self.heard + self.ttl

    def post(self, path: str, body: dict[str, Any], **how: Any) -> Send:
        return Send(self.url, "POST", self.base + path, self, body, **how)

    def events(self) -> Send:
        return Send(self.url, "GET", self.base + "/v1/sessions/events", self, silence=p.SILENCE)

    def longest_wait(self) -> float:
        """The longest wait of one request: a third of the ttl, at most 50 s."""
        return min(self.ttl / 3, 50.0)

    def failed(self, error: p.Error) -> None:
        self.gone |= error.code == "no_session"
        self.draining |= error.code == "draining"
        self.avoided = True

    def kept(self, sent: float, claims: Iterable[Claimed], answer: Mapping[str, Any]) -> None:
        """Applies the answer to a keep-alive of these claims."""
        try:
            said = {str(entry["id"]): entry for entry in answer["claims"]}
        except (LookupError, TypeError) as error:
            raise p.incomplete() from error
        self.heard = max(self.heard, sent)
        self.draining = bool(answer.get("draining", False))
        self.avoided = False
        for claim in claims:
            if claim.id in said:
                claim.learn(sent, said[claim.id], self.ttl)

    def connected(self) -> None:
        """Its events are heard from now on."""
        self.unread = b""
        # Earlier ones were missed, of what was claimed before it.
        self.poked.set()

    def feed(self, chunk: bytes) -> None:
        """Applies a part of the stream of events."""
        *events, self.unread = (self.unread + chunk).split(b"\n\n")
        if len(self.unread) > p.EVENT:
            raise p.Unreachable("unreachable", "the gateway's events are not understood")
        for event in events:
            self._told(event.decode("utf-8", "replace"))

    def _told(self, text: str) -> None:
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        if fields.get("event") == "gap":
            self.poked.set()
        if fields.get("event") != "claim":
            return
        try:
            data = json.loads(fields.get("data", ""))
            claim, state = self.claims.get(data["id"]), data["state"]
        except (ValueError, LookupError, TypeError, RecursionError):
            self.poked.set()
            return
        if claim is not None and state in p.GONE:
            claim.lose(state)
            self.state.tell_losses()


class State:
    """What a client has in one process. The halves add how steps are performed."""

    #: Makes an event of threads, or of tasks.
    event: Callable[[], Any]
    #: The class of holds.
    hold: Any

    def __init__(self, settings: p.Settings, closed: bool) -> None:
        self.settings = settings
        self.home = os.getpid()
        self.lock = threading.Lock()
        self.sessions: list[Session] = []
        self.holds: dict[str, HoldCore] = {}
        #: Set when the nearest deadline may have changed.
        self.changed = self.event()
        self.closed = closed

    def start(self, steps: "Steps[None]") -> None:
        """Performs steps in the background."""
        raise NotImplementedError

    def must_be_here(self) -> None:
        """Nothing is sent for another process: both would speak on one connection."""
        if self.home != os.getpid():
            raise p.Error("forked", "this belongs to the process that this one is a fork of")

    def must_be_open(self) -> None:
        self.must_be_here()
        if self.closed:
            raise p.Error("closed", "the client is closed")

    def fail(self, error: Exception) -> NoReturn:
        """Raises what a failed request means."""
        if self.closed:
            raise p.Error("closed", "the client is closed", "maybe_applied") from error
        if isinstance(error, httpx.LocalProtocolError):
            raise p.unreachable(error) from None
        raise error if isinstance(error, RuntimeError) else p.unreachable(error) from error

    def urls(self) -> list[str]:
        """The gateways, those that failed last."""
        with self.lock:
            failed = {session.url for session in self.sessions if not session.takes()}
        return sorted(self.settings.urls, key=lambda url: url in failed)

    def current(self) -> Session | None:
        """The session for new claims. Call it with the lock."""
        return next((one for one in reversed(self.sessions) if one.takes()), None)

    def add(self, claim: Claimed) -> Session | None:
        with self.lock:
            session = self.current()
            if session is not None:
                session.claims[claim.id] = claim
            return session

    def has_ended(self, session: Session) -> bool:
        """Whether a session is of no more use; then it is forgotten."""
        with self.lock:
            if not self.closed and (session.claims or session is self.current()):
                return False
            if not self.closed and session.avoided and not session.gone:
                # The only one may become usable again.
                if self.current() is None and p.now() < session.heard + session.ttl:
                    return False
            if session in self.sessions:
                self.sessions.remove(session)
            return True

    def adopt(self, session: Session, claim: Claimed) -> Any:
        hold = self.hold(self, session, claim)
        with self.lock:
            # `close` has released what was held then.
            self.must_be_open()
            self.holds[claim.id] = hold
        self.changed.set()
        return hold

    def until_next(self) -> float | None:
        """Until the next deadline. At most a second, because timers stand still during suspend."""
        with self.lock:
            deadlines = [hold._claim.deadline for hold in self.holds.values()]
        return max(0.0, min(1.0, min(deadlines) - p.now())) if deadlines else None

    def tell_losses(self) -> None:
        with self.lock:
            lost = [hold for hold in self.holds.values() if not hold.valid]
            for hold in lost:
                del self.holds[hold._claim.id]
                hold._session.claims.pop(hold._claim.id, None)
        for hold in lost:
            hold.lost.set()

    def abandon(self) -> None:
        """Voids all holds in a process, or loop of events, that is not the one that made them."""
        for hold in list(self.holds.values()):
            hold._abandon()


Steps = Generator[Send | Listen | Pause | Nap | Open, Any, T]


class HoldCore:
    """What holds of both clients share."""

    _claim: Claimed

    def __init__(self, state: State, session: Session, claim: Claimed) -> None:
        self._state = state
        self._session = session
        self._claim = claim
        #: Set when the hold is lost, or released.
        self.lost = state.event()

    def __repr__(self) -> str:
        state = "valid" if self.valid else "not valid"
        return f"<{type(self).__name__} of {self.name!r}, token {self.token}, {state}>"

    @property
    def name(self) -> str:
        return self._claim.name

    @property
    def token(self) -> int:
        """The fencing token: greater for every later exclusive grant of this name."""
        return self._claim.token

    @property
    def valid(self) -> bool:
        """Whether it is held now, by this process."""
        return self._claim.valid()

    def remaining(self) -> float:
        """For how many seconds it stays valid without a further keep-alive."""
        return max(0.0, self._claim.deadline - p.now()) if self.valid else 0.0

    def check(self) -> None:
        """Raises :class:`Lost` unless it is held now."""
        if not self.valid:
            raise self._over()

    def _over(self) -> p.Lost:
        claim = self._claim
        if claim.is_foreign():
            whose = f"process {claim.home}, of which this one is a fork"
            return p.Lost("lost", f"{self.name} was locked by {whose}")
        code = "evicted" if claim.state == "evicted" else "lost"
        return p.Lost(code, f"{self.name} is not held any more")

    def _abandon(self) -> None:
        if self._claim.is_foreign():
            self._claim.void = True
        else:
            self._claim.lose("lost")
        # Another thread may have had the event's lock at the time of the fork.
        getattr(self.lost, "_at_fork_reinit", lambda: None)()
        self.lost.set()
