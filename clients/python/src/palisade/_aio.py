"""The asyncio client: performs the steps of `_core.py` with tasks."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, AsyncIterator, Mapping, TypeVar

import httpx

from . import _core as core
from . import _deadline as deadline
from . import _protocol as p
from . import _state as state

T = TypeVar("T")


class State(state.State):
    """What a client has in one process, and in one loop of events."""

    event = staticmethod(asyncio.Event)

    def __init__(self, settings: p.Settings, closed: bool) -> None:
        super().__init__(settings, closed)
        self.hold = AsyncHold
        self.loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._http: dict[str, httpx.AsyncClient] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def drive(self, steps: state.Steps[T]) -> T:
        """Performs steps to their result."""
        try:
            step = next(steps)
            while True:
                try:
                    done = await self._perform(step)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    # Also a cancellation: a claim is released before it goes on.
                    step = steps.throw(error)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            result: T = end.value
            return result

    def start(self, steps: state.Steps[None]) -> None:
        self._task(self.drive(steps))

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        # A loop keeps no reference of its own.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _perform(self, step: Any) -> Any:
        if isinstance(step, state.Send):
            if step.shielded:
                return await asyncio.shield(self._task(self._send(step)))
            return await self._send(step)
        if isinstance(step, state.Listen):
            return await self._listen(step.session)
        if isinstance(step, state.Nap):
            # Not `wait_for`, which before 3.12 loses a cancellation beside the event.
            timer = None
            if step.seconds is not None:
                timer = asyncio.get_running_loop().call_later(step.seconds, step.event.set)
            try:
                await step.event.wait()
            finally:
                if timer is not None:
                    timer.cancel()
            step.event.clear()
        elif isinstance(step, state.Pause):
            await asyncio.sleep(step.seconds)
        else:
            await self._open(step)
        return None

    async def _open(self, step: state.Open) -> None:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            self.start(core.watch(self))
        if self._opening is None or self._opening.done():
            # A task of its own: whoever is cancelled leaves it to the others.
            self._opening = self._task(self.drive(core.opened(self, step)))
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        opening = self._opening
        await asyncio.wait({opening}, timeout=step.left())
        if not opening.done() or opening.cancelled():
            raise p.late()
        if (error := opening.exception()) is not None:
            raise error.again() if isinstance(error, p.Error) else error

    def _client(self, door: str) -> httpx.AsyncClient:
        """The connections to a configured URL, and to the gateways behind it."""
        self.must_be_here()
        if door not in self._http:
            transport = httpx.AsyncHTTPTransport(**self.settings.options(door))
            headers = self.settings.headers()
            self._http[door] = httpx.AsyncClient(transport=transport, headers=headers)
        return self._http[door]

    def _stream(self, step: state.Send) -> Any:
        traced = {"trace": deadline.atrace}
        return self._client(step.door).stream(**step.request(), extensions=traced)

    async def _send(self, step: state.Send) -> dict[str, Any]:
        body = bytearray()
        try:
            # Not in its time: a client's first connection reads certificates, which takes a while.
            stream = self._stream(step)
            with deadline.within(step.longest()):
                async with stream as answer:
                    async for chunk in answer.aiter_raw():
                        step.take(body, chunk)
                    return p.understood(answer.status_code, bytes(body))
        except (httpx.HTTPError, RuntimeError) as error:
            self.fail(error)

    async def _listen(self, session: state.Session) -> None:
        try:
            stream = self._stream(session.events())
            with deadline.within(p.REQUEST):
                async with stream as answer:
                    if answer.status_code != 200:
                        body = bytearray()
                        async for chunk in answer.aiter_raw():
                            session.events().take(body, chunk)
                        raise p.no_events(answer.status_code, bytes(body))
                    session.connected()
                    deadline.lift()
                    async for chunk in answer.aiter_raw():
                        session.feed(chunk)
        except (httpx.HTTPError, RuntimeError) as error:
            self.fail(error)

    async def close(self) -> None:
        await self.drive(core.close(self))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for http in self._http.values():
            await http.aclose()


class AsyncHold(state.HoldCore):
    """A lock that is held. Pass :attr:`token` to the storage with every write."""

    _state: State
    lost: asyncio.Event

    async def proclaim(self, value: str) -> None:
        """Replaces the value of this leader."""
        await self._state.drive(core.amend(self, {"value": value}))

    async def downgrade(self) -> None:
        """Downgrades to a read lock; the token stays."""
        await self._state.drive(core.amend(self, {"mode": "shared"}))

    async def upgrade(self) -> None:
        """Upgrades this reader to a writer; raises :class:`Busy` if there are others."""
        await self._state.drive(core.amend(self, {"mode": "exclusive"}))

    async def release(self) -> None:
        """Releases it. Raises :class:`Lost` if it was lost before."""
        await self._state.drive(core.release(self))

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

    async def _acquire(self) -> AsyncHold:
        here: State = self._client._here()
        hold: AsyncHold = await here.drive(core.acquire(here, *self._args))
        return hold

    def __await__(self) -> Any:
        return self._acquire().__await__()

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


class AsyncClient(core.ClientCore[Acquiring]):
    """A client of one gateway, or of the first of several that answers."""

    def _new_state(self, closed: bool) -> State:
        return State(self._settings, closed)

    def _here(self) -> State:
        here: State = super()._here()
        if here.loop is not None and here.loop.is_closed():
            # Its tasks are gone, and nothing was kept alive since.
            self._start_anew()
            here = self._state
        return here

    def _take(
        self, name: str, ask: Mapping[str, Any], wait: float | None, value: str | None = None
    ) -> Acquiring:
        return Acquiring(self, name, ask, wait, value)

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
        here = self._here()
        return await here.drive(core.leader(here, name))

    async def lines(self, prefix: str = "") -> list[dict[str, Any]]:
        """Who holds and who waits."""
        here = self._here()
        return await here.drive(core.lines(here, prefix))

    async def close(self) -> None:
        """Releases everything that this process holds."""
        await self._here().close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
