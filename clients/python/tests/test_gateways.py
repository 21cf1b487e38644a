"""Clients of both kinds behind balancers, at gateways that stop, and under operators who remove
locks: a hold is kept where it can be, and its loss is told before another holds."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any, Callable

import pytest

import palisade
from conftest import LIMIT, Gateway, Proxy
from palisade import _protocol as protocol


def test_holds_live_behind_a_balancer_that_chooses_at_random(
    make: Callable[..., Any], start: Callable[..., Gateway], proxy: Proxy, access: Path
) -> None:
    gateways = [start("--access", str(access)) for _ in range(2)]
    chance = random.Random(7)
    proxy.choose = lambda: chance.choice(gateways)
    # Each client opens its session at one of them.
    clients = [make(proxy, ttl=1.0) for _ in range(4)]
    holds = [c.lock(f"{at}/{name}", wait=LIMIT) for at, c in enumerate(clients) for name in "ab"]
    assert not holds[0].lost.wait(3.0)
    assert all(hold.valid for hold in holds)
    for hold in holds:
        hold.release()
    for c in clients:
        c.__exit__(None, None, None)


def test_an_eviction_is_told_within_a_second(make: Callable[..., Any], gateway: Gateway) -> None:
    with make(gateway) as c:
        # Its events are heard soon after the session is opened.
        for turn in range(3):
            hold = c.lock("a", wait=LIMIT)
            claim = c.lines()[0]["holders"][0]["id"]
            asked = protocol.now()
            body = {"name": "a", "claim": claim, "how": "mark", "reason": "test"}
            assert gateway.ask("POST", "/v1/evictions", body)[0] == 200
            assert hold.lost.wait(LIMIT)
            took = protocol.now() - asked
            assert not hold.valid and took < 1.0
            # Its place is free as soon as it has let go.
            with pytest.raises(palisade.Lost) as told:
                hold.release()
            assert told.value.code == "evicted"


def test_removals_elsewhere_are_told_within_a_second(
    make: Callable[..., Any], start: Callable[..., Gateway]
) -> None:
    gateway, other = start(), start()
    with make(gateway) as c:
        for how in ("ask", "force"):
            hold = c.lock("a", wait=LIMIT)
            body = {"name": "a", "how": how, "reason": "test"}
            evicting = threading.Thread(target=other.ask, args=("POST", "/v1/evictions", body))
            asked = protocol.now()
            evicting.start()
            assert hold.lost.wait(LIMIT)
            took = protocol.now() - asked
            assert not hold.valid
            # Another gateway's removal is found by this one, in a survey or a renewal.
            assert took < (1.0 if how == "ask" else LIMIT)
            with pytest.raises(palisade.Lost):
                hold.release()
            evicting.join()


@pytest.mark.parametrize("missed_by", ["the first stream", "the second stream"])
def test_events_that_were_missed_are_made_up_for(
    make: Callable[..., Any], start: Callable[..., Gateway], proxy: Proxy, missed_by: str
) -> None:
    gateway = proxy.in_front_of(start)
    streams, evicted = threading.Semaphore(0), threading.Event()
    late = 0 if missed_by == "the first stream" else 1

    def before(path: str) -> None:
        if path == "/v1/sessions/events":
            streams.release()
            if len(proxy.streams) == late:
                # It begins after the eviction.
                evicted.wait(LIMIT)

    proxy.before = before
    with make(proxy) as c:
        hold = c.lock("a", wait=LIMIT)
        assert streams.acquire(timeout=LIMIT)
        if late == 1:
            proxy.cut()
            # It asks for another at once.
            assert streams.acquire(timeout=LIMIT)
        claim = gateway.ask("GET", "/v1/lines?name=a")[1]["lines"][0]["holders"][0]["id"]
        body = {"name": "a", "claim": claim, "how": "mark", "reason": "test"}
        assert gateway.ask("POST", "/v1/evictions", body)[0] == 200
        evicted.set()
        asked = protocol.now()
        assert hold.lost.wait(LIMIT)
        assert protocol.now() - asked < 1.0


@pytest.mark.parametrize("turn", range(2))
def test_a_stopped_gateway_is_a_loss_before_the_next_grant(
    make: Callable[..., Any], start: Callable[..., Gateway], turn: int
) -> None:
    gateway, other = start(), start()
    lost: dict[str, float] = {}
    granted: dict[str, float] = {}
    names = [f"{name}" for name in range(6)]
    clients = [make(gateway, ttl=1.2) for _ in names]
    with palisade.Client(other.unix, ttl=1.2) as next_one:
        holds = []
        for name, c in zip(names, clients):
            holds.append(c.lock(name))
            # Their keep-alives come at different times.
            threading.Event().wait(0.05 + 0.02 * turn)

        def wait(name: str) -> None:
            with next_one.lock(name, wait=LIMIT):
                granted[name] = protocol.now()

        def told(name: str, hold: Any) -> None:
            if hold.lost.wait(LIMIT):
                lost[name] = protocol.now()

        works = [threading.Thread(target=wait, args=(name,)) for name in names]
        works += [threading.Thread(target=told, args=one) for one in zip(names, holds)]
        for work in works:
            work.start()
        gateway.signal(signal.SIGSTOP)
        for work in works:
            work.join()
        gateway.kill()
    late = {name: lost[name] - granted[name] for name in names if lost[name] > granted[name]}
    assert not late
    assert not any(hold.valid for hold in holds)
    for c in clients:
        c.__exit__(None, None, None)


def test_a_late_waiting_does_not_end_a_hold(
    make: Callable[..., Any], start: Callable[..., Gateway], proxy: Proxy
) -> None:
    gateway = proxy.in_front_of(start)
    caught, granted = threading.Event(), threading.Event()

    def after(path: str, body: bytes) -> None:
        if path == "/v1/sessions/keepalive" and b'"waiting"' in body and not caught.is_set():
            caught.set()
            granted.wait(LIMIT)

    proxy.after = after
    # The keep-alive that is late must not be given up before its answer comes.
    with palisade.Client(gateway.unix) as holder, make(proxy, ttl=4.0) as c:
        first = holder.lock("a")
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(c.lock("a", wait=LIMIT)))
        waiting.start()
        assert caught.wait(LIMIT)
        first.release()
        waiting.join()
        granted.set()
        assert not got[0].lost.wait(1.0)
        got[0].check()
        got[0].release()


def test_a_keep_alive_that_overtakes_a_claim_does_not_end_it(
    make: Callable[..., Any], start: Callable[..., Gateway], proxy: Proxy
) -> None:
    proxy.in_front_of(start)
    overtaken = threading.Event()

    def before(path: str) -> None:
        if path == "/v1/claims":
            overtaken.wait(LIMIT)

    def after(path: str, body: bytes) -> None:
        if path == "/v1/sessions/keepalive":
            overtaken.set()

    proxy.before, proxy.after = before, after
    with make(proxy, ttl=2.0) as c:
        hold = c.lock("a", wait=5.0)
        hold.check()
        hold.release()


def test_a_hold_is_not_kept_by_a_close_that_came_before_it(gateway: Gateway) -> None:
    for _ in range(5):
        c = palisade.Client(gateway.url, token=gateway.token)
        got: list[palisade.Hold] = []

        def take() -> None:
            try:
                while True:
                    got.append(c.lock(f"a/{len(got)}"))
            except palisade.Error:
                pass

        taking = threading.Thread(target=take)
        taking.start()
        while not got:
            threading.Event().wait(0.001)
        c.close()
        taking.join(LIMIT)
        assert not taking.is_alive()
        assert not any(hold.valid for hold in got)
