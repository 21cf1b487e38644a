"""The blocking client, with one thread that keeps its sessions alive."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterable, Iterator, Mapping

import httpx

from . import _protocol as p


class Session:
    """A session at one gateway; its claims belong to that gateway."""

    def __init__(self, settings: p.Settings, url: str) -> None:
        self.settings = settings
        self.secret = p.new_secret()
        self.claims: dict[str, p.Claimed] = {}
        self.usable = True
        base, options = settings.transport(url)
        transport = httpx.HTTPTransport(**options)
        timeout = httpx.Timeout(p.REQUEST)
        self.http = httpx.Client(
            base_url=base, headers=settings.headers(), transport=transport, timeout=timeout
        )
        try:
            body = {"ttl": p.span(settings.ttl), "secret": self.secret}
            self.post("/v1/sessions", body)
        except BaseException:
            self.http.close()
            raise

    def post(self, path: str, body: Mapping[str, Any], wait: float = 0.0) -> dict[str, Any]:
        headers = {"Palisade-Session": self.secret}
        timeout = httpx.Timeout(p.REQUEST, read=wait + p.REQUEST)
        try:
            answer = self.http.post(path, json=dict(body), headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise p.unreachable(error) from error
        if answer.status_code >= 400:
            raise p.failure(answer)
        document: dict[str, Any] = answer.json()
        return document

    def keep_alive(self) -> None:
        """Extends the session and all its claims; without a response nothing changes."""
        claims = [claim for claim in list(self.claims.values()) if not claim.is_over()]
        sent = p.now()
        try:
            answer = self.post("/v1/sessions/keepalive", {"claims": [c.id for c in claims]})
        except p.Unreachable as error:
            # Holds stay valid until their own deadlines; new claims use another gateway.
            self.usable &= error.code not in p.ELSEWHERE
            return
        except p.Error:
            return
        self.usable &= not answer.get("draining", False)
        known = {entry["id"]: entry for entry in answer["claims"]}
        for claim in claims:
            claim.learn(sent, known.get(claim.id, {}))


class Hold:
    """A lock that is held. Pass :attr:`token` to the storage with every write."""

    def __init__(self, client: "Client", session: Session, claim: p.Claimed) -> None:
        self._client = client
        self._session = session
        self._claim = claim
        #: Set when the hold is lost.
        self.lost = threading.Event()

    @property
    def name(self) -> str:
        return self._claim.name

    @property
    def token(self) -> int:
        """The fencing token: greater for every later exclusive grant of this name."""
        return self._claim.token

    @property
    def valid(self) -> bool:
        """Whether it is held now."""
        return self._claim.valid()

    def remaining(self) -> float:
        """For how many seconds it stays valid without a further keep-alive."""
        return max(0.0, self._claim.deadline - p.now()) if self.valid else 0.0

    def check(self) -> None:
        """Raises :class:`Lost` unless it is held now."""
        if not self.valid:
            raise p.Lost("lost", f"{self.name} is not held any more")

    def proclaim(self, value: str) -> None:
        """Replaces the value of this leader."""
        self._amend({"value": value})

    def downgrade(self) -> None:
        """Downgrades to a read lock; the token stays."""
        self._amend({"mode": "shared"})

    def upgrade(self) -> None:
        """Upgrades this reader to a writer; raises :class:`Busy` if there are others."""
        self._amend({"mode": "exclusive"})

    def _amend(self, change: Mapping[str, Any]) -> None:
        sent = p.now()
        answer = self._session.post("/v1/claims/amend", {"id": self._claim.id, **change})
        self._claim.learn(sent, answer)

    def release(self) -> None:
        """Releases it. Raises :class:`Lost` if it was lost before."""
        self._client._release(self._session, self._claim, self)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except p.Error:
            # An exception of the work itself takes precedence.
            if kind is None:
                raise


class Client:
    """A client of one gateway, or of the first of several that answers."""

    def __init__(
        self,
        url: str | Iterable[str],
        *,
        token: str | None = None,
        ttl: float = 30.0,
        owner: str | None = None,
        label: str | None = None,
        verify: Any = True,
    ) -> None:
        self._settings = p.Settings.make(url, token, ttl, owner, label, verify)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._sessions: list[Session] = []
        self._holds: dict[str, Hold] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    # Primitives.

    def lock(self, name: str, *, wait: float | None = None) -> Hold:
        """Locks ``name``. Waits without a limit, or raises :class:`Busy` after ``wait`` seconds."""
        return self._acquire(name, p.exclusive(), wait)

    def read(self, name: str, *, wait: float | None = None) -> Hold:
        """Takes the read lock."""
        return self._acquire(name, p.shared(), wait)

    def write(self, name: str, *, wait: float | None = None) -> Hold:
        """Takes the write lock: the same as :meth:`lock`."""
        return self._acquire(name, p.exclusive(), wait)

    def semaphore(
        self, name: str, capacity: int, *, weight: int = 1, wait: float | None = None
    ) -> Hold:
        """Takes ``weight`` of ``capacity`` permits."""
        return self._acquire(name, p.permits(weight, capacity), wait)

    def campaign(self, name: str, value: str, *, wait: float | None = None) -> Hold:
        """Waits to lead the election ``name``, with ``value`` for others to read."""
        return self._acquire(name, p.exclusive(), wait, value)

    @contextmanager
    def lead(self, name: str, value: str, *, wait: float | None = None) -> Iterator[Hold]:
        """Leads during a ``with`` block; raises :class:`Lost` if the leadership was lost in it."""
        with self.campaign(name, value, wait=wait) as hold:
            yield hold
            hold.check()

    def leader(self, name: str) -> dict[str, Any] | None:
        """The leader of the election, if there is one."""
        answer = self._get("/v1/leaders", {"name": name})
        leader: dict[str, Any] | None = answer["leader"]
        return leader

    def lines(self, prefix: str = "") -> list[dict[str, Any]]:
        """Who holds and who waits."""
        lines: list[dict[str, Any]] = []
        query = {"prefix": prefix}
        while True:
            page = self._get("/v1/lines", query)
            lines += page["lines"]
            if page["next"] is None:
                return lines
            query["after"] = page["next"]

    def close(self) -> None:
        """Releases everything."""
        with self._lock:
            self._closed = True
            sessions, self._sessions = self._sessions, []
            holds, self._holds = list(self._holds.values()), {}
        self._wake.set()
        for hold in holds:
            hold._claim.lose("released")
            hold.lost.set()
        for session in sessions:
            try:
                session.http.delete("/v1/sessions", headers={"Palisade-Session": session.secret})
            except httpx.HTTPError:
                pass  # It ends with its ttl.
            session.http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Implementation.

    def _session(self) -> Session:
        """The session for new claims; a new one at the next gateway if it is not usable."""
        with self._opening:
            with self._lock:
                if self._closed:
                    raise p.Error("closed", "the client is closed")
                if self._sessions and self._sessions[-1].usable:
                    return self._sessions[-1]
            last: p.Error = p.Unreachable("unreachable", "no gateway answers")
            for url in self._settings.urls:
                try:
                    session = Session(self._settings, url)
                except p.Unreachable as error:
                    last = error
                    continue
                with self._lock:
                    self._sessions.append(session)
                    if self._thread is None:
                        keep = threading.Thread(target=self._keep, name="palisade", daemon=True)
                        self._thread = keep
                        keep.start()
                return session
            raise last

    def _acquire(
        self, name: str, ask: Mapping[str, Any], wait: float | None, value: str | None = None
    ) -> Hold:
        until = None if wait is None else p.now() + wait
        pause = 0.05
        while True:
            try:
                return self._attempt(name, ask, until, value)
            except p.Unreachable:
                if until is not None and p.now() >= until:
                    raise
            # The gateway of this claim is gone: claim again at another.
            self._wake.wait(pause)
            pause = min(2 * pause, 1.0)

    def _attempt(
        self, name: str, ask: Mapping[str, Any], until: float | None, value: str | None
    ) -> Hold:
        session = self._session()
        claim = p.Claimed(p.new_id(), name, value=value)
        with self._lock:
            session.claims[claim.id] = claim
        granted = False
        try:
            path, fresh, heard = "/v1/claims", True, p.now()
            while not granted:
                left = self._settings.longest_wait()
                if until is not None:
                    left = max(0.0, min(left, until - p.now()))
                wait = {"id": claim.id, "wait": p.span(left)}
                body = claim.document(self._settings, ask, left) if fresh else wait
                sent = p.now()
                try:
                    claim.learn(sent, session.post(path, body, left))
                except p.Unreachable as error:
                    out_of_time = p.now() - heard > self._settings.ttl
                    if error.code in p.ELSEWHERE or out_of_time:
                        session.usable = False
                        raise
                    if until is not None and p.now() >= until:
                        raise
                    # The response was lost: retry the same claim while its session may be alive.
                    self._wake.wait(0.05)
                    continue
                heard = p.now()
                granted = claim.valid()
                path, fresh = "/v1/claims/wait", False
                if not granted and until is not None and p.now() >= until:
                    raise p.Busy("busy", f"{name} is held by others")
            hold = Hold(self, session, claim)
            with self._lock:
                self._holds[claim.id] = hold
            self._wake.set()
            return hold
        finally:
            if not granted:
                self._leave(session, claim)

    def _leave(self, session: Session, claim: p.Claimed) -> None:
        """Releases a claim that is no longer wanted; if that fails, it ends with its ttl."""
        with self._lock:
            session.claims.pop(claim.id, None)
        claim.lose("released")
        try:
            session.post("/v1/claims/release", {"id": claim.id})
        except p.Error:
            pass

    def _release(self, session: Session, claim: p.Claimed, hold: Hold) -> None:
        with self._lock:
            # From here on no keep-alive names this claim.
            session.claims.pop(claim.id, None)
            self._holds.pop(claim.id, None)
        if claim.state == "released":
            return
        was_valid = claim.valid()
        claim.lose("released")
        hold.lost.set()
        try:
            session.post("/v1/claims/release", {"id": claim.id})
        except p.Unreachable:
            if was_valid:
                raise
        if not was_valid:
            raise p.Lost("lost", f"{claim.name} was lost while it was held")

    def _keep(self) -> None:
        """Keeps sessions alive and reports losses to holds, until the client is closed."""
        apart = self._settings.ttl / p.KEEPALIVES
        due = p.now() + apart
        while True:
            with self._lock:
                if self._closed:
                    return
                deadlines = [hold._claim.deadline for hold in self._holds.values()]
            self._wake.wait(max(0.0, min([due, *deadlines]) - p.now()))
            self._wake.clear()
            if p.now() >= due:
                due = p.now() + apart
                with self._lock:
                    sessions = list(self._sessions)
                for session in sessions:
                    # A gateway that hangs must not delay the report of losses.
                    beat = threading.Thread(target=session.keep_alive, daemon=True)
                    beat.start()
                    beat.join(min(apart, 1.0))
            self._tell_losses()

    def _tell_losses(self) -> None:
        with self._lock:
            lost = [hold for hold in self._holds.values() if not hold.valid]
            for hold in lost:
                self._holds.pop(hold._claim.id, None)
                hold._session.claims.pop(hold._claim.id, None)
            idle = [s for s in self._sessions[:-1] if not s.claims and not s.usable]
            self._sessions = [s for s in self._sessions if s not in idle]
        for session in idle:
            session.http.close()
        for hold in lost:
            hold._claim.lose()
            hold.lost.set()

    def _get(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        session = self._session()
        try:
            answer = session.http.get(path, params=dict(query))
        except httpx.HTTPError as error:
            raise p.unreachable(error) from error
        if answer.status_code >= 400:
            raise p.failure(answer)
        document: dict[str, Any] = answer.json()
        return document
