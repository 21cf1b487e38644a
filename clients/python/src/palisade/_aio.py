"""The asyncio client, with one task that keeps its sessions alive."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, AsyncIterator, Iterable, Mapping

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
        transport = httpx.AsyncHTTPTransport(**options)
        timeout = httpx.Timeout(p.REQUEST)
        self.http = httpx.AsyncClient(
            base_url=base, headers=settings.headers(), transport=transport, timeout=timeout
        )

    async def open(self) -> None:
        try:
            body = {"ttl": p.span(self.settings.ttl), "secret": self.secret}
            await self.post("/v1/sessions", body)
        except BaseException:
            await self.http.aclose()
            raise

    async def post(self, path: str, body: Mapping[str, Any], wait: float = 0.0) -> dict[str, Any]:
        headers = {"Palisade-Session": self.secret}
        timeout = httpx.Timeout(p.REQUEST, read=wait + p.REQUEST)
        try:
            answer = await self.http.post(path, json=dict(body), headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise p.unreachable(error) from error
        if answer.status_code >= 400:
            raise p.failure(answer)
        document: dict[str, Any] = answer.json()
        return document

    async def keep_alive(self) -> None:
        """Extends the session and all its claims; without a response nothing changes."""
        claims = [claim for claim in self.claims.values() if not claim.is_over()]
        sent = p.now()
        try:
            answer = await self.post("/v1/sessions/keepalive", {"claims": [c.id for c in claims]})
        except p.Unreachable as error:
            self.usable &= error.code not in p.ELSEWHERE
            return
        except p.Error:
            return
        self.usable &= not answer.get("draining", False)
        known = {entry["id"]: entry for entry in answer["claims"]}
        for claim in claims:
            claim.learn(sent, known.get(claim.id, {}))


class AsyncHold:
    """A lock that is held. Pass :attr:`token` to the storage with every write."""

    def __init__(self, client: "AsyncClient", session: Session, claim: p.Claimed) -> None:
        self._client = client
        self._session = session
        self._claim = claim
        #: Set when the hold is lost.
        self.lost = asyncio.Event()

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

    async def proclaim(self, value: str) -> None:
        """Replaces the value of this leader."""
        await self._amend({"value": value})

    async def downgrade(self) -> None:
        """Downgrades to a read lock; the token stays."""
        await self._amend({"mode": "shared"})

    async def upgrade(self) -> None:
        """Upgrades this reader to a writer; raises :class:`Busy` if there are others."""
        await self._amend({"mode": "exclusive"})

    async def _amend(self, change: Mapping[str, Any]) -> None:
        sent = p.now()
        answer = await self._session.post("/v1/claims/amend", {"id": self._claim.id, **change})
        self._claim.learn(sent, answer)

    async def release(self) -> None:
        """Releases it. Raises :class:`Lost` if it was lost before."""
        await self._client._release(self._session, self._claim, self)

    async def __aenter__(self) -> "AsyncHold":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.release()
        except p.Error:
            # An exception of the work itself takes precedence.
            if kind is None:
                raise


class Acquiring:
    """``await`` it for the hold, or use it in ``async with``."""

    def __init__(self, client: "AsyncClient", *args: Any) -> None:
        self._client = client
        self._args = args
        self._hold: AsyncHold | None = None

    def __await__(self) -> Any:
        return self._client._acquire(*self._args).__await__()

    async def __aenter__(self) -> AsyncHold:
        self._hold = await self
        return self._hold

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hold is not None:
            await self._hold.__aexit__(kind, error, trace)


class AsyncClient:
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
        self._opening = asyncio.Lock()
        self._sessions: list[Session] = []
        self._holds: dict[str, AsyncHold] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    # Primitives.

    def lock(self, name: str, *, wait: float | None = None) -> Acquiring:
        """Locks ``name``. Waits without a limit, or raises :class:`Busy` after ``wait`` seconds."""
        return Acquiring(self, name, p.exclusive(), wait)

    def read(self, name: str, *, wait: float | None = None) -> Acquiring:
        """Takes the read lock."""
        return Acquiring(self, name, p.shared(), wait)

    def write(self, name: str, *, wait: float | None = None) -> Acquiring:
        """Takes the write lock: the same as :meth:`lock`."""
        return Acquiring(self, name, p.exclusive(), wait)

    def semaphore(
        self, name: str, capacity: int, *, weight: int = 1, wait: float | None = None
    ) -> Acquiring:
        """Takes ``weight`` of ``capacity`` permits."""
        return Acquiring(self, name, p.permits(weight, capacity), wait)

    def campaign(self, name: str, value: str, *, wait: float | None = None) -> Acquiring:
        """Waits to lead the election ``name``, with ``value`` for others to read."""
        return Acquiring(self, name, p.exclusive(), wait, value)

    @asynccontextmanager
    async def lead(
        self, name: str, value: str, *, wait: float | None = None
    ) -> AsyncIterator[AsyncHold]:
        """Leads during a block; raises :class:`Lost` if the leadership was lost in it."""
        async with self.campaign(name, value, wait=wait) as hold:
            yield hold
            hold.check()

    async def leader(self, name: str) -> dict[str, Any] | None:
        """The leader of the election, if there is one."""
        answer = await self._get("/v1/leaders", {"name": name})
        leader: dict[str, Any] | None = answer["leader"]
        return leader

    async def lines(self, prefix: str = "") -> list[dict[str, Any]]:
        """Who holds and who waits."""
        lines: list[dict[str, Any]] = []
        query = {"prefix": prefix}
        while True:
            page = await self._get("/v1/lines", query)
            lines += page["lines"]
            if page["next"] is None:
                return lines
            query["after"] = page["next"]

    async def close(self) -> None:
        """Releases everything."""
        self._closed = True
        sessions, self._sessions = self._sessions, []
        holds, self._holds = list(self._holds.values()), {}
        if self._task is not None:
            self._task.cancel()
        for hold in holds:
            hold._claim.lose("released")
            hold.lost.set()
        for session in sessions:
            headers = {"Palisade-Session": session.secret}
            try:
                await session.http.delete("/v1/sessions", headers=headers)
            except httpx.HTTPError:
                pass  # It ends with its ttl.
            await session.http.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Implementation.

    async def _session(self) -> Session:
        """The session for new claims; a new one at the next gateway if it is not usable."""
        async with self._opening:
            if self._closed:
                raise p.Error("closed", "the client is closed")
            if self._sessions and self._sessions[-1].usable:
                return self._sessions[-1]
            last: p.Error = p.Unreachable("unreachable", "no gateway answers")
            for url in self._settings.urls:
                session = Session(self._settings, url)
                try:
                    await session.open()
                except p.Unreachable as error:
                    last = error
                    continue
                self._sessions.append(session)
                if self._task is None:
                    self._task = asyncio.create_task(self._keep())
                return session
            raise last

    async def _acquire(
        self, name: str, ask: Mapping[str, Any], wait: float | None, value: str | None = None
    ) -> AsyncHold:
        until = None if wait is None else p.now() + wait
        pause = 0.05
        while True:
            try:
                return await self._attempt(name, ask, until, value)
            except p.Unreachable:
                if until is not None and p.now() >= until:
                    raise
            # The gateway of this claim is gone: claim again at another.
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _attempt(
        self, name: str, ask: Mapping[str, Any], until: float | None, value: str | None
    ) -> AsyncHold:
        session = await self._session()
        claim = p.Claimed(p.new_id(), name, value=value)
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
                    claim.learn(sent, await session.post(path, body, left))
                except p.Unreachable as error:
                    out_of_time = p.now() - heard > self._settings.ttl
                    if error.code in p.ELSEWHERE or out_of_time:
                        session.usable = False
                        raise
                    if until is not None and p.now() >= until:
                        raise
                    # The response was lost: retry the same claim while its session may be alive.
                    await asyncio.sleep(0.05)
                    continue
                heard = p.now()
                granted = claim.valid()
                path, fresh = "/v1/claims/wait", False
                if not granted and until is not None and p.now() >= until:
                    raise p.Busy("busy", f"{name} is held by others")
            hold = AsyncHold(self, session, claim)
            self._holds[claim.id] = hold
            self._wake.set()
            return hold
        finally:
            if not granted:
                # Also on cancellation; a claim that can't be released ends with its ttl.
                await asyncio.shield(asyncio.create_task(self._leave(session, claim)))

    async def _leave(self, session: Session, claim: p.Claimed) -> None:
        session.claims.pop(claim.id, None)
        claim.lose("released")
        try:
            await session.post("/v1/claims/release", {"id": claim.id})
        except p.Error:
            pass

    async def _release(self, session: Session, claim: p.Claimed, hold: AsyncHold) -> None:
        # From here on no keep-alive names this claim.
        session.claims.pop(claim.id, None)
        self._holds.pop(claim.id, None)
        if claim.state == "released":
            return
        was_valid = claim.valid()
        claim.lose("released")
        hold.lost.set()
        try:
            await session.post("/v1/claims/release", {"id": claim.id})
        except p.Unreachable:
            if was_valid:
                raise
        if not was_valid:
            raise p.Lost("lost", f"{claim.name} was lost while it was held")

    async def _keep(self) -> None:
        """Keeps sessions alive and reports losses to holds."""
        apart = self._settings.ttl / p.KEEPALIVES
        due = p.now() + apart
        while not self._closed:
            deadlines = [hold._claim.deadline for hold in self._holds.values()]
            left = max(0.0, min([due, *deadlines]) - p.now())
            try:
                await asyncio.wait_for(self._wake.wait(), left)
            except asyncio.TimeoutError:
                pass
            self._wake.clear()
            if p.now() >= due:
                due = p.now() + apart
                beats = [asyncio.create_task(s.keep_alive()) for s in self._sessions]
                if beats:
                    # A gateway that hangs must not delay the report of losses.
                    await asyncio.wait(beats, timeout=min(apart, 1.0))
            self._tell_losses()

    def _tell_losses(self) -> None:
        for hold in [hold for hold in self._holds.values() if not hold.valid]:
            self._holds.pop(hold._claim.id, None)
            hold._session.claims.pop(hold._claim.id, None)
            hold._claim.lose()
            hold.lost.set()

    async def _get(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        session = await self._session()
        try:
            answer = await session.http.get(path, params=dict(query))
        except httpx.HTTPError as error:
            raise p.unreachable(error) from error
        if answer.status_code >= 400:
            raise p.failure(answer)
        document: dict[str, Any] = answer.json()
        return document
