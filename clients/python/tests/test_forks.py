"""A child that was forked holds nothing, sends nothing for what its parent holds, and can lock for
itself."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
import time
from typing import Any, Callable

import pytest

import palisade
from conftest import LIMIT, Gateway


def client(gateway: Gateway, **options: Any) -> palisade.Client:
    return palisade.Client(gateway.url, token=gateway.token, **options)


def child(work: Callable[[], object]) -> str:
    """What ``work`` returns in a child that was forked, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], LIMIT)[0]:
            os.kill(pid, signal.SIGKILL)
            return "hangs"
        return os.read(read, 4096).decode()
    finally:
        os.close(read)
        os.waitpid(pid, 0)


def is_busy(other: palisade.Client, name: str) -> bool:
    try:
        other.lock(name, wait=0.3).release()
    except palisade.Busy:
        return True
    return False


def test_a_child_that_leaves_the_block_releases_nothing(gateway: Gateway) -> None:
    with client(gateway) as c, client(gateway) as other:
        pid = None
        try:
            with c.lock("a") as hold:
                pid = os.fork()
                if pid == 0:
                    sys.exit(0)
                os.waitpid(pid, 0)
                assert is_busy(other, "a")
                hold.check()
        finally:
            if pid == 0:
                os._exit(0)


def test_close_in_a_child_releases_nothing(gateway: Gateway) -> None:
    with client(gateway) as c, client(gateway) as other, c.lock("a") as a, c.lock("b") as b:
        assert child(c.close) == "None"
        assert is_busy(other, "a") and is_busy(other, "b")
        a.check()
        b.check()


def test_a_hold_is_void_in_a_child(gateway: Gateway) -> None:
    with client(gateway) as c, client(gateway) as other, c.lock("a") as hold:
        assert child(lambda: (hold.valid, hold.remaining(), hold.lost.wait(1))) == "(False, 0.0, True)"
        for use in (hold.check, hold.release, hold.downgrade):
            said = child(use)
            assert said.startswith("Lost: lost: a was locked by process "), said
        assert hold.valid and not hold.lost.is_set()
        assert is_busy(other, "a")


def test_a_child_starts_anew_and_keeps_what_it_locks(gateway: Gateway) -> None:
    with client(gateway, ttl=1.0) as c:
        hold = c.lock("a")

        def work() -> tuple[bool, bool, bool, bool]:
            own = c.lock("b", wait=LIMIT)
            # It is kept alive, too, and told when it is lost.
            kept = not own.lost.wait(2.5) and own.valid
            pids = {line["name"]: line["holders"][0]["pid"] for line in c.lines()}
            shown = pids == {"a": os.getppid(), "b": os.getpid()}
            busy = is_busy(c, "a")
            os.kill(gateway.process.pid, signal.SIGKILL)
            return kept, shown, busy, own.lost.wait(LIMIT)

        assert child(work) == "(True, True, True, True)"
        assert hold.lost.wait(LIMIT)


def test_a_fork_amid_the_work_of_threads_does_not_hang(gateway: Gateway) -> None:
    with client(gateway, ttl=2.0) as c, client(gateway) as other, c.lock("a") as hold:
        done = threading.Event()

        def work(name: str) -> None:
            while not done.is_set():
                with c.lock(name):
                    pass

        threads = [threading.Thread(target=work, args=(name,)) for name in ("x", "y", "z")]
        for thread in threads:
            thread.start()
        try:
            for turn in range(12):
                use = [c.close, lambda: c.lock(f"own/{turn}", wait=LIMIT).valid, lambda: hold.valid]
                assert child(use[turn % 3]) in ("None", "True", "False")
            assert is_busy(other, "a")
            hold.check()
        finally:
            done.set()
            for thread in threads:
                thread.join()


def test_asyncio_in_a_child(gateway: Gateway) -> None:
    c = palisade.AsyncClient(gateway.url, token=gateway.token, ttl=1.0)
    held: list[palisade.AsyncHold] = []

    async def work() -> None:
        async with c.lock("a") as hold:
            held.append(hold)
            pid = os.fork()
            if pid == 0:
                # Its parent's loop is of no use to it.
                void = not hold.valid and hold.lost.is_set()
                os._exit(0 if void else 1)
            assert os.waitpid(pid, 0)[1] == 0
            await asyncio.sleep(2.0)
            hold.check()
            with client(gateway) as other:
                assert is_busy(other, "a")
            # What a child does after the loop of its parent.
            assert await asyncio.to_thread(child, lambda: asyncio.run(again())) == "(True, True, True)"
            hold.check()

    async def again() -> tuple[bool, bool, bool]:
        hold = held[0]
        with pytest.raises(palisade.Lost):
            await hold.release()
        async with c.lock("b", wait=LIMIT) as own:
            await asyncio.sleep(1.5)
            kept = own.valid
            try:
                await c.lock("a", wait=0.1)
                busy = False
            except palisade.Busy:
                busy = True
        await c.close()
        return not hold.valid, kept, busy

    async def both() -> None:
        await work()
        await c.close()

    asyncio.run(asyncio.wait_for(both(), 2 * LIMIT))


def test_one_client_in_one_loop_after_another(gateway: Gateway) -> None:
    c = palisade.AsyncClient(gateway.url, token=gateway.token, ttl=1.0)

    async def work() -> palisade.AsyncHold:
        return await c.lock("a", wait=LIMIT)

    first = asyncio.run(work())
    # Nobody keeps it alive any more: it ends with its ttl, and the next loop's is another.
    second = asyncio.run(work())
    assert first.lost.is_set() and not first.valid and second.token > first.token


@pytest.mark.parametrize("turns", range(4))
def test_a_loop_ends_though_its_client_was_just_woken(gateway: Gateway, turns: int) -> None:
    async def work() -> None:
        c = palisade.AsyncClient(gateway.url, token=gateway.token)
        await c.lock("a")
        for session in c._state.sessions:
            session.poked.set()
        c._state.changed.set()
        for _ in range(turns):
            await asyncio.sleep(0)

    loop = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    loop.start()
    loop.join(LIMIT)
    assert not loop.is_alive()


def test_nobody_else_holds_whatever_children_do(gateway: Gateway) -> None:
    with client(gateway, ttl=1.0) as c, client(gateway, ttl=1.0) as other:
        granted = threading.Event()
        hold = c.lock("a")

        def wait() -> None:
            other.lock("a")
            granted.set()

        threading.Thread(target=wait, daemon=True).start()
        uses: list[Callable[[], object]] = [
            c.close,
            hold.release,
            hold.downgrade,
            lambda: hold.__exit__(None, None, None),
            lambda: c.lock("own", wait=LIMIT).release(),
            lambda: is_busy(c, "a"),
            lambda: os._exit(0),
            lambda: os.kill(os.getpid(), signal.SIGKILL),
        ]
        began = time.monotonic()
        for use in uses:
            child(use)
            assert hold.valid and not granted.is_set()
        # Past the ttl of whatever a child may have ended.
        assert not hold.lost.wait(max(0.0, began + 3.0 - time.monotonic()))
        assert not granted.is_set()
        hold.release()
        assert granted.wait(LIMIT)
