"""Both clients against a real gateway: locks, losses, gateways that are killed and drained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable

import pytest

import palisade
from conftest import LIMIT, Gateway
from palisade import _protocol as protocol


def client(gateway: Gateway, **options: Any) -> palisade.Client:
    return palisade.Client(gateway.url, token=gateway.token, **options)


def test_a_lock_excludes_and_tokens_rise(gateway: Gateway) -> None:
    with client(gateway) as one, client(gateway) as other:
        with one.lock("a") as hold:
            assert hold.valid and hold.remaining() > 0
            hold.check()
            first = hold.token
            with pytest.raises(palisade.Busy):
                other.lock("a", wait=0.2)
            assert [line["name"] for line in other.lines()] == ["a"]
        with other.lock("a", wait=LIMIT) as hold:
            assert hold.token > first
        assert one.lines() == []


def test_the_socket_needs_no_token(gateway: Gateway) -> None:
    with palisade.Client(gateway.unix) as local, local.lock("a") as hold:
        assert hold.token > 0


def test_a_wrong_token_is_an_error(gateway: Gateway) -> None:
    with palisade.Client(gateway.url, token="wrong") as stranger:
        with pytest.raises(palisade.Error) as refused:
            stranger.lock("a", wait=1.0)
        assert refused.value.code == "unauthorized"
        assert "wrong" not in str(refused.value)


def test_readers_permits_and_amendments(gateway: Gateway) -> None:
    with client(gateway) as c:
        with c.write("doc") as hold:
            token = hold.token
            hold.downgrade()
            assert hold.token == token
            with c.read("doc", wait=LIMIT):
                with pytest.raises(palisade.Busy):
                    hold.upgrade()
        with c.semaphore("pool", 3, weight=2), c.semaphore("pool", 3):
            with pytest.raises(palisade.Busy):
                c.semaphore("pool", 3, wait=0.1)


def test_an_election(gateway: Gateway) -> None:
    with client(gateway) as c:
        assert c.leader("boss") is None
        with c.lead("boss", "10.0.0.7") as hold:
            leader = c.leader("boss")
            assert leader is not None and leader["value"] == "10.0.0.7"
            hold.proclaim("10.0.0.8")
            leader = c.leader("boss")
            assert leader is not None and leader["value"] == "10.0.0.8"


def test_a_hold_lives_longer_than_its_ttl(gateway: Gateway) -> None:
    with client(gateway, ttl=1.0) as c, c.lock("a") as hold:
        assert not hold.lost.wait(3.0)
        hold.check()


def test_a_killed_gateway_is_a_loss_in_time(start: Callable[[], Gateway]) -> None:
    gateway, other = start(), start()
    with client(gateway, ttl=1.5) as c, client(other, ttl=1.5) as next_one:
        hold = c.lock("a")
        gateway.kill()
        granted: list[float] = []

        def wait() -> None:
            with next_one.lock("a", wait=LIMIT):
                granted.append(protocol.now())

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert hold.lost.wait(LIMIT)
        lost = protocol.now()
        waiting.join()
        assert hold._claim.deadline <= granted[0], "granted within the promise"
        assert lost - hold._claim.deadline < 1.0
        with pytest.raises(palisade.Lost):
            hold.check()


def test_several_gateways_and_one_that_drains(start: Callable[[], Gateway]) -> None:
    gateway, other = start(), start()
    # Both tokens would be one in an access file; the sockets need none.
    with palisade.Client([gateway.unix, other.unix], ttl=2.0) as c:
        with c.lock("a"):
            gateway.signal(signal.SIGTERM)
            deadline = time.monotonic() + LIMIT
            # New claims go to the other gateway; existing holds stay and are released.
            while other.ask("GET", "/v1/engine?check=false")[1]["sessions"] == 0:
                assert time.monotonic() < deadline
                c.lock("b", wait=LIMIT).release()
        assert gateway.process.wait(LIMIT) == 0


def test_a_process_that_was_stopped_past_its_ttl_knows(gateway: Gateway) -> None:
    script = (
        "import palisade, sys\n"
        "hold = palisade.Client(sys.argv[1], token=sys.argv[2], ttl=1.0).lock('a')\n"
        "print('held', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(hold.valid, hold.lost.wait(5), flush=True)\n"
    )
    path = os.path.dirname(os.path.dirname(palisade.__file__))
    process = subprocess.Popen(
        [sys.executable, "-c", script, gateway.url, gateway.token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline().strip() == "held"
    process.send_signal(signal.SIGSTOP)
    with client(gateway) as c, c.lock("a", wait=LIMIT):
        process.stdin.write("\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline().strip() == "False True"
    process.kill()
    process.wait()


def test_asyncio(gateway: Gateway) -> None:
    async def work() -> None:
        async with palisade.AsyncClient(gateway.url, token=gateway.token, ttl=1.0) as c:
            hold = await c.lock("a")
            with pytest.raises(palisade.Busy):
                await c.lock("a", wait=0.1)
            waiting = asyncio.ensure_future(c.lock("a", wait=LIMIT))
            await asyncio.sleep(1.5)
            hold.check()
            first = hold.token
            await hold.release()
            async with await waiting as second:
                assert second.token > first
            # A cancelled wait leaves no claim behind.
            async with c.lock("a"):
                task = asyncio.ensure_future(c.lock("a"))
                while not (await c.lines())[0]["waiters"]:
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while (await c.lines())[0]["waiters"]:
                    await asyncio.sleep(0.01)
            async with c.lead("boss", "me"):
                leader = await c.leader("boss")
                assert leader is not None and leader["value"] == "me"

    asyncio.run(asyncio.wait_for(work(), LIMIT))


def test_asyncio_is_told_of_a_loss(start: Callable[[], Gateway]) -> None:
    gateway = start()

    async def work() -> None:
        c = palisade.AsyncClient(gateway.url, token=gateway.token, ttl=1.0)
        hold = await c.lock("a")
        gateway.kill()
        await asyncio.wait_for(hold.lost.wait(), LIMIT)
        assert not hold.valid
        await c.close()

    asyncio.run(work())
