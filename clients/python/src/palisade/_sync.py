"""The blocking client: performs the steps of `_core.py` with threads.

One thread watches deadlines; each session, of which there is usually one, has a thread that keeps it
alive and one that hears its events.
"""

from __future__ import annotations

import threading
import time
from concurrent import futures
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Iterator, Mapping, TypeVar

import httpx

from . import _core as core
from . import _deadline as deadline
from . import _protocol as p
from . import _state as state

T = TypeVar("T")


class State(state.State):
    """What a client has in one process."""

    event = staticmethod(threading.Event)

    def __init__(self, settings: p.Settings, closed: bool) -> None:
        super().__init__(settings, closed)
        self.hold = Hold
        self._opening: futures.Future[None] | None = None
        self._http: dict[str, httpx.Client] = {}
        self._is_watched = False

    def drive(self, steps: state.Steps[T]) -> T:
        """Performs steps to their result."""
        try:
            step = next(steps)
            while True:
                try:
                    done = self._perform(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            result: T = end.value
            return result

    def start(self, steps: state.Steps[None]) -> None:
        threading.Thread(target=self.drive, args=(steps,), name="palisade", daemon=True).start()

    def _perform(self, step: Any) -> Any:
        if isinstance(step, state.Send):
            return self._send(step)
        if isinstance(step, state.Listen):
            return self._listen(step.session)
        if isinstance(step, state.Nap):
            step.event.wait(step.seconds)
            step.event.clear()
        elif isinstance(step, state.Pause):
            time.sleep(step.seconds)
        else:
            self._open(step)
        return None

    def _open(self, step: state.Open) -> None:
        # Not the lock first: at the time of a fork another thread may have had it.
        self.must_be_here()
        with self.lock:
            opening, mine = self._opening, futures.Future[None]()
            if opening is None:
                self._opening = mine
        if opening is not None:
            return self._await(opening, step)
        failure: p.Error | None = p.Unreachable("unreachable", "nobody opens a session any more")
        try:
            if not self._is_watched:
                self._is_watched = True
                self.start(core.watch(self))
            self.drive(core.opened(self, step))
            failure = None
        except p.Error as error:
            failure = error
            raise
        finally:
            with self.lock:
                self._opening = None
            if failure is None:
                mine.set_result(None)
            else:
                mine.set_exception(failure)

    def _await(self, opening: futures.Future[None], step: state.Open) -> None:
        """What became of a session that another thread opens."""
        try:
            error = opening.exception(step.left())
        except futures.TimeoutError:
            raise p.late() from None
        if isinstance(error, p.Error):
            raise error.again()

    def _client(self, door: str) -> httpx.Client:
        """The connections to a configured URL, and to the gateways behind it."""
        # Not the lock first: at the time of a fork another thread may have had it.
        self.must_be_here()
        with self.lock:
            if door not in self._http:
                transport = httpx.HTTPTransport(**self.settings.options(door))
                headers = self.settings.headers()
                self._http[door] = httpx.Client(transport=transport, headers=headers)
            return self._http[door]

    def _stream(self, step: state.Send) -> Any:
        traced = {"trace": deadline.trace}
        return self._client(step.door).stream(**step.request(), extensions=traced)

    def _send(self, step: state.Send) -> dict[str, Any]:
        body = bytearray()
        try:
            # Not in its time: a client's first connection reads certificates, which takes a while.
            stream = self._stream(step)
            with deadline.within(step.longest()), stream as answer:
                for chunk in answer.iter_raw():
                    step.take(body, chunk)
                return p.understood(answer.status_code, bytes(body))
        except (httpx.HTTPError, RuntimeError) as error:
            self.fail(error)

    def _listen(self, session: state.Session) -> None:
        try:
            stream = self._stream(session.events())
            with deadline.within(p.REQUEST), stream as answer:
                if answer.status_code != 200:
                    body = bytearray()
                    for chunk in answer.iter_raw():
                        session.events().take(body, chunk)
                    raise p.no_events(answer.status_code, bytes(body))
                session.connected()
                deadline.lift()
                for chunk in answer.iter_raw():
                    session.feed(chunk)
        except (httpx.HTTPError, RuntimeError) as error:
            self.fail(error)

    def close(self) -> None:
        self.drive(core.close(self))
        for http in self._http.values():
            http.close()


class Hold(state.HoldCore):
    """A lock that is held. Pass :attr:`token` to the storage with every write."""

    _state: State
    lost: threading.Event

    def proclaim(self, value: str) -> None:
        """Replaces the value of this leader."""
        self._state.drive(core.amend(self, {"value": value}))

    def downgrade(self) -> None:
        """Downgrades to a read lock; the token stays."""
        self._state.drive(core.amend(self, {"mode": "shared"}))

    def upgrade(self) -> None:
        """Upgrades this reader to a writer; raises :class:`Busy` if there are others."""
        self._state.drive(core.amend(self, {"mode": "exclusive"}))

    def release(self) -> None:
        """Releases it. Raises :class:`Lost` if it was lost before."""
        self._state.drive(core.release(self))

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


class Client(core.ClientCore[Hold]):
    """A client of one gateway, or of the first of several that answers."""

    def _new_state(self, closed: bool) -> State:
        return State(self._settings, closed)

    def _take(
        self, name: str, ask: Mapping[str, Any], wait: float | None, value: str | None = None
    ) -> Hold:
        here: State = self._here()
        hold: Hold = here.drive(core.acquire(here, name, ask, wait, value))
        return hold

    @contextmanager
    def lead(self, name: str, value: str, *, wait: float | None = None) -> Iterator[Hold]:
        """Leads during a ``with`` block; raises :class:`Lost` if the leadership was lost in it."""
        with self.campaign(name, value, wait=wait) as hold:
            yield hold
            hold.check()

    def leader(self, name: str) -> dict[str, Any] | None:
        """The leader of the election, if there is one."""
        here: State = self._here()
        return here.drive(core.leader(here, name))

    def lines(self, prefix: str = "") -> list[dict[str, Any]]:
        """Who holds and who waits."""
        here: State = self._here()
        return here.drive(core.lines(here, prefix))

    def close(self) -> None:
        """Releases everything that this process holds."""
        self._here().close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
