"""One deadline over every whole request.

httpx bounds each read of a socket alone, so that an answer of a byte now and then never ends:
a header in drops, or interim responses one after another. Each stream that httpx opens is told
here to read no longer than until the deadline of the request that reads, which is the caller's own
context, also on a connection that is used again.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Iterator

import httpx

from . import _protocol as p

_until: ContextVar[float | None] = ContextVar("palisade_until", default=None)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is sent and read in this block ends after this time."""
    before = _until.set(p.now() + seconds)
    try:
        yield
    finally:
        _until.reset(before)


def lift() -> None:
    """From here on the stream may go on without an end."""
    _until.set(None)


def _left(timeout: float | None) -> float | None:
    """The time for one read or write."""
    until = _until.get()
    if until is None:
        return timeout
    left = until - p.now()
    if left <= 0:
        raise httpx.ReadTimeout("the whole answer takes too long")
    return left if timeout is None else min(left, timeout)


def _opened(event: str, info: dict[str, Any]) -> Any:
    """The stream of a connection that was opened."""
    ends = ("connect_tcp.complete", "connect_unix_socket.complete", "start_tls.complete")
    return info.get("return_value") if event.endswith(ends) else None


def trace(event: str, info: dict[str, Any]) -> None:
    """httpx's ``trace`` extension of a blocking request."""
    if (stream := _opened(event, info)) is not None:
        read, write = stream.read, stream.write
        stream.read = lambda size, timeout=None: read(size, _left(timeout))
        stream.write = lambda data, timeout=None: write(data, _left(timeout))


async def atrace(event: str, info: dict[str, Any]) -> None:
    """The same for asyncio."""
    if (stream := _opened(event, info)) is None:
        return
    read, write = stream.read, stream.write

    async def bounded_read(size: int, timeout: float | None = None) -> Any:
        return await read(size, _left(timeout))

    async def bounded_write(data: bytes, timeout: float | None = None) -> None:
        await write(data, _left(timeout))

    stream.read, stream.write = bounded_read, bounded_write
