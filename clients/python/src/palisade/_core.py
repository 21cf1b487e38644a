"""The protocol, once for both clients: generators that yield steps (a request, a pause), which
`_sync.py` performs with threads and `_aio.py` with tasks.

All that happens on the way from a claim to its end is here, and what clients of both kinds share.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Generic, Iterable, Mapping, TypeVar

from . import _protocol as p
from ._state import Claimed, HoldCore, Listen, Nap, Open, Pause, Send, Session, State, Steps


def opened(state: State, step: Open) -> Steps[None]:
    """Opens a session if there is none for new claims. One at a time."""
    state.must_be_open()
    with state.lock:
        if state.current() is not None:
            return
    last: p.Error = p.Unreachable("unreachable", "no gateway answers")
    urls = state.urls()
    for at, url in enumerate(urls):
        # A gateway that hangs leaves time for the next one.
        left = step.left()
        within = p.REQUEST if left is None else min(p.REQUEST, left / (len(urls) - at))
        session = Session(state, url)
        body = {"ttl": p.span(session.ttl), "secret": session.secret}
        sent = p.now()
        try:
            answer = yield Send(url, "POST", p.base(url) + "/v1/sessions", body=body, within=within)
        except p.Unreachable as error:
            last = error
            continue
        session.opened(sent, answer)
        if not session.takes():
            # It would be opened again and again.
            last = p.late()
            continue
        with state.lock:
            state.must_be_open()
            state.sessions.append(session)
        state.start(keep(session))
        state.start(listen(session))
        return
    raise last


def acquire(
    state: State, name: str, ask: Mapping[str, Any], wait: float | None, value: str | None
) -> Steps[Any]:
    """The hold. Claims again, elsewhere, when the gateway of a claim is gone."""
    until = None if wait is None else p.now() + wait
    pause = 0.05
    while True:
        try:
            return (yield from attempt(state, name, ask, until, value))
        except p.Unreachable:
            if until is not None and p.now() >= until:
                raise
        except p.Lost as error:
            if error.code not in p.AGAIN:
                raise
            if until is not None and p.now() >= until:
                raise p.Busy("busy", f"{name} is held by others") from error
        yield Pause(pause if until is None else max(0.0, min(pause, until - p.now())))
        pause = min(2 * pause, 1.0)


def attempt(
    state: State,
    name: str,
    ask: Mapping[str, Any],
    until: float | None,
    value: str | None,
) -> Steps[Any]:
    """One claim, from its place in the line to the hold."""
    claim = Claimed(name, value)
    by = None if until is None else until + p.GRACE

    def within() -> float:
        return p.REQUEST if by is None else min(p.REQUEST, max(0.1, by - p.now()))

    session = state.add(claim)
    while session is None:
        yield Open(by)
        session = state.add(claim)
        if session is None and by is not None and p.now() >= by:
            raise p.late()
    try:
        answered, heard = False, p.now()
        while not claim.valid():
            left = session.longest_wait()
            if until is not None:
                left = max(0.0, min(left, until - p.now()))
            sent = p.now()
            spare = p.REQUEST if by is None else max(0.1, min(p.REQUEST, by - sent - left))
            try:
                if answered:
                    body = {"id": claim.id, "wait": p.span(left)}
                    answer = yield session.post("/v1/claims/wait", body, wait=left, within=spare)
                else:
                    body = claim.document(state.settings, ask, left)
                    answer = yield session.post("/v1/claims", body, wait=left, within=spare)
            except p.Unreachable as error:
                # A place in a line is not given up for one lost answer, unless its gateway is gone.
                moves = not answered and len(state.settings.urls) > 1
                out_of_time = p.now() - heard > session.ttl
                if error.code in p.ELSEWHERE or out_of_time or moves:
                    session.failed(error)
                    raise
                if until is not None and p.now() >= until:
                    raise
                # The response was lost: retry the same claim while its session may be alive.
                yield Pause(0.05)
                continue
            claim.learn(sent, answer, session.ttl)
            answered, heard = True, p.now()
            session.heard = max(session.heard, sent)
            if claim.is_over():
                # Its deadline passed, or an event came, before the grant was seen here.
                kind = p.KINDS.get(claim.state, p.Lost)
                raise kind(claim.state, f"{name} was {claim.state} as soon as it was held")
            if not claim.valid() and until is not None and p.now() >= until:
                raise p.Busy("busy", f"{name} is held by others")
        return state.adopt(session, claim)
    except GeneratorExit:
        raise
    except BaseException:
        # Also on cancellation; a claim that can't be released ends with its ttl.
        with state.lock:
            session.claims.pop(claim.id, None)
        claim.lose("released")
        try:
            body = {"id": claim.id}
            yield session.post("/v1/claims/release", body, within=within(), shielded=True)
        except p.Error:
            pass
        raise


def amend(hold: HoldCore, change: Mapping[str, Any]) -> Steps[None]:
    hold.check()
    sent = p.now()
    claim, session = hold._claim, hold._session
    try:
        answer = yield session.post("/v1/claims/amend", {"id": claim.id, **change})
    except p.Lost as error:
        claim.lose(error.code)
        hold._state.tell_losses()
        raise
    claim.learn(sent, answer, session.ttl)


def release(hold: HoldCore) -> Steps[None]:
    claim, session = hold._claim, hold._session
    if claim.is_foreign():
        # It is the other process's: nothing is sent.
        raise hold._over()
    with hold._state.lock:
        # From here on no keep-alive names this claim.
        session.claims.pop(claim.id, None)
        hold._state.holds.pop(claim.id, None)
    was = claim.lose("released")
    hold.lost.set()
    if was == "released":
        return
    try:
        yield session.post("/v1/claims/release", {"id": claim.id}, shielded=True)
    except p.Unreachable:
        if was == "held":
            raise
    if was != "held":
        raise p.Lost("lost", f"{claim.name} was lost while it was held")


def close(state: State) -> Steps[None]:
    """Releases everything of this process."""
    with state.lock:
        state.closed = True
        sessions, state.sessions = state.sessions, []
        holds, state.holds = list(state.holds.values()), {}
    for hold in holds:
        hold._claim.lose("released")
        hold.lost.set()
    state.changed.set()
    for session in sessions:
        session.poked.set()
        try:
            yield Send(session.url, "DELETE", session.base + "/v1/sessions", session)
        except p.Error:
            pass  # It ends with its ttl.


def watch(state: State) -> Steps[None]:
    """Tells holds of their deadlines. It sends nothing, so that nothing delays it."""
    while not state.closed:
        yield Nap(state.changed, state.until_next())
        state.tell_losses()


def keep(session: Session) -> Steps[None]:
    """Keeps a session and its claims alive until they are over."""
    apart = session.ttl / p.KEEPALIVES
    nap, sent = apart, 0.0
    while True:
        yield Nap(session.poked, nap)
        early = sent + min(apart, p.APART) - p.now()
        if early > 0:
            # Many events in a row are one reason.
            yield Pause(early)
        if session.state.has_ended(session):
            return
        sent = p.now()
        try:
            yield from keep_alive(session, sent)
            nap = max(0.0, sent + apart - p.now())
        except p.Unreachable as error:
            # Holds stay valid until their own deadlines; new claims use another gateway.
            session.failed(error)
            nap = apart if session.gone else min(apart / 4, 1.0)
        except Exception:
            # Whatever was answered, the next one may be well.
            nap = apart
        session.state.tell_losses()


def keep_alive(session: Session, sent: float) -> Steps[None]:
    with session.state.lock:
        claims = [one for one in session.claims.values() if one.known and not one.is_over()]
    body = {"claims": [claim.id for claim in claims]}
    # The next one uses another connection.
    within = min(p.REQUEST, max(session.ttl / p.KEEPALIVES, 0.5))
    answer = yield session.post("/v1/sessions/keepalive", body, within=within)
    session.kept(sent, claims, answer)


def listen(session: Session) -> Steps[None]:
    """Hears of losses and evictions as they happen; without it, by the next keep-alive."""
    longest = min(session.ttl / p.KEEPALIVES, p.REQUEST)
    pause = longest / 16
    while not session.state.closed and not session.gone and session in session.state.sessions:
        began = p.now()
        try:
            yield Listen(session)
        except p.Unreachable as error:
            session.gone |= error.code == "no_session"
        except Exception:
            # An older gateway, or too many streams; or no gateway's answer.
            pause = longest
        pause = longest / 16 if p.now() - began > longest else min(2 * pause, longest)
        yield Pause(pause)


def ask(state: State, path: str, query: dict[str, str], limit: int) -> Steps[dict[str, Any]]:
    """Asks the first gateway that answers."""
    state.must_be_open()
    last: p.Error = p.Unreachable("unreachable", "no gateway answers")
    for url in state.urls():
        try:
            answer: dict[str, Any] = yield Send(
                url, "GET", p.base(url) + path, query=query, limit=limit
            )
            return answer
        except p.Unreachable as error:
            last = error
    raise last


def leader(state: State, name: str) -> Steps[dict[str, Any] | None]:
    answer = yield from ask(state, "/v1/leaders", {"name": name}, p.ANSWER)
    found: dict[str, Any] | None = answer["leader"]
    return found


def lines(state: State, prefix: str) -> Steps[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    query = {"prefix": prefix}
    while True:
        page = yield from ask(state, "/v1/lines", query, p.SURVEY)
        found += page["lines"]
        if page["next"] is None:
            return found
        query["after"] = page["next"]


# What clients of both kinds share.

Taken = TypeVar("Taken")
_clients: "weakref.WeakSet[ClientCore[Any]]" = weakref.WeakSet()


class ClientCore(Generic[Taken]):
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
        self._state = self._new_state(closed=False)
        _clients.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self._settings.urls)}>"

    def _new_state(self, closed: bool) -> Any:
        raise NotImplementedError

    def _here(self) -> Any:
        """The state of this process."""
        if self._state.home != os.getpid():
            self._start_anew()
        return self._state

    def _start_anew(self) -> None:
        old, self._state = self._state, self._new_state(self._state.closed)
        # Connections are shared with the other process: they are dropped, and nothing is sent.
        old.abandon()

    def _take(
        self, name: str, ask: Mapping[str, Any], wait: float | None, value: str | None = None
    ) -> Taken:
        raise NotImplementedError

    def lock(self, name: str, *, wait: float | None = None) -> Taken:
        """Locks ``name``. Waits without a limit, or raises :class:`Busy` after ``wait`` seconds."""
        return self._take(name, p.exclusive(), wait)

    def read(self, name: str, *, wait: float | None = None) -> Taken:
        """Takes the read lock."""
        return self._take(name, p.shared(), wait)

    def write(self, name: str, *, wait: float | None = None) -> Taken:
        """Takes the write lock: the same as :meth:`lock`."""
        return self._take(name, p.exclusive(), wait)

    def semaphore(
        self, name: str, capacity: int, *, weight: int = 1, wait: float | None = None
    ) -> Taken:
        """Takes ``weight`` of ``capacity`` permits."""
        return self._take(name, p.permits(weight, capacity), wait)

    def campaign(self, name: str, value: str, *, wait: float | None = None) -> Taken:
        """Waits to lead the election ``name``, with ``value`` for others to read."""
        return self._take(name, p.exclusive(), wait, value)


def _in_child() -> None:
    for client in list(_clients):
        client._start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
