"""Clients of both kinds at a server that speaks for a gateway and lies: slow, endless or absurd
answers are an error of the request that they answer, within its time."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from typing import Any, Callable, Iterator

import pytest

import palisade
from conftest import LIMIT, TOKEN
from palisade import _protocol as protocol

class Liar:
    """Answers as a gateway does, except at the paths in ``lies``: a status and a document or text;
    or nothing, if the lie wrote to the connection itself."""

    def __init__(self) -> None:
        self.lies: dict[str, Callable[[dict[str, Any], socket.socket], Any]] = {}
        self.heard: list[str] = []
        self.over = threading.Event()
        self.token = TOKEN
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                there, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(there,), daemon=True).start()

    def serve(self, there: socket.socket) -> None:
        with there, there.makefile("rb") as asked:
            try:
                while line := asked.readline():
                    length = 0
                    while (header := asked.readline()).strip():
                        name, _, text = header.decode().partition(":")
                        length = int(text) if name.lower() == "content-length" else length
                    path, body = line.split()[1].decode(), asked.read(length)
                    self.heard.append(path)
                    says = self.says(path, json.loads(body) if body else {}, there)
                    if says is None:
                        return
                    text = says[1] if isinstance(says[1], str) else json.dumps(says[1])
                    head = f"HTTP/1.1 {says[0]} X\r\nContent-Length: {len(text)}\r\n\r\n"
                    there.sendall((head + text).encode())
            except OSError:
                pass

    def says(self, path: str, body: dict[str, Any], there: socket.socket) -> Any:
        if path in self.lies:
            return self.lies[path](body, there)
        if path == "/v1/sessions":
            return 201, {"ttl_ms": 2000}
        if path == "/v1/sessions/events":
            there.sendall(b"HTTP/1.1 200 OK\r\n\r\n: alive\n\n")
            self.over.wait(60)
            return None
        if path == "/v1/sessions/keepalive":
            return 200, {"claims": [held(one) for one in body.get("claims", [])], "draining": False}
        return 200, held(body.get("id"))

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < end
            time.sleep(0.01)

    def drip(self, first: bytes, part: bytes, pause: float = 0.1) -> Callable[..., None]:
        """An answer without an end."""

        def drip(_: dict[str, Any], there: socket.socket) -> None:
            there.sendall(first)
            while not self.over.wait(pause):
                there.sendall(part)

        return drip


def held(claim: Any, **more: Any) -> dict[str, Any]:
    return {"id": claim, "state": "held", "token": "7", "valid_ms": 1800, **more}


@pytest.fixture
def liar() -> Iterator[Liar]:
    liar = Liar()
    yield liar
    liar.over.set()
    liar.listener.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "GRACE", 0.5)


def takes(seconds: float, work: Callable[[], Any]) -> list[palisade.Error]:
    """The errors of work that ends within this time."""
    errors: list[palisade.Error] = []

    def run() -> None:
        try:
            work()
        except palisade.Error as error:
            errors.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(seconds)
    assert not running.is_alive(), "it does not end"
    return errors


GAP = b"event: gap\ndata: {}\n\n"
DRIPS = {
    "headers": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "interim responses": (b"", b"HTTP/1.1 102 P\r\n\r\n"),
    "a chunk's extension": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a"),
    "a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b" "),
}


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/claims"])
@pytest.mark.parametrize("drip", DRIPS)
def test_an_answer_in_drops_ends_with_the_wait(
    make: Callable[..., Any], liar: Liar, drip: str, path: str
) -> None:
    liar.lies[path] = liar.drip(*DRIPS[drip])
    c = make(liar, ttl=2.0)
    (error,) = takes(4.0, lambda: c.lock("a", wait=0.2))
    assert isinstance(error, palisade.Unreachable)


def test_a_connection_that_is_used_again_has_a_deadline(make: Callable[..., Any], liar: Liar) -> None:
    with make(liar, ttl=2.0) as c:
        c.lock("a", wait=5.0).release()
        liar.lies["/v1/claims"] = liar.drip(*DRIPS["headers"])
        assert takes(4.0, lambda: c.lock("b", wait=0.2))


def test_a_keep_alive_in_drops_does_not_delay_the_loss(make: Callable[..., Any], liar: Liar) -> None:
    liar.lies["/v1/sessions/keepalive"] = liar.drip(*DRIPS["headers"])
    c = make(liar, ttl=2.0)
    hold = c.lock("a", wait=5.0)
    assert hold.lost.wait(4.0)
    # The keeper gives each of them up.
    assert liar.heard.count("/v1/sessions/keepalive") > 1


def test_a_session_that_is_over_before_it_is_opened_is_no_session(
    make: Callable[..., Any], liar: Liar
) -> None:
    def slow(_: dict[str, Any], __: socket.socket) -> Any:
        time.sleep(0.3)
        return 201, {"ttl_ms": 200}

    liar.lies["/v1/sessions"] = slow
    c = make(liar, ttl=2.0)
    (error,) = takes(4.0, lambda: c.lock("a", wait=1.0))
    assert isinstance(error, palisade.Unreachable)


def test_those_who_wait_for_a_session_share_its_failure(make: Callable[..., Any], liar: Liar) -> None:
    liar.lies["/v1/sessions"] = lambda _, __: liar.over.wait(60) and None
    c = make(liar, ttl=10.0)
    began, took = time.monotonic(), []

    def claim(name: int) -> None:
        with pytest.raises(palisade.Unreachable):
            c.lock(f"{name}", wait=1.0)
        took.append(time.monotonic() - began)

    claiming = [threading.Thread(target=claim, args=(at,), daemon=True) for at in range(10)]
    for one in claiming:
        one.start()
    for one in claiming:
        one.join(LIMIT)
    assert len(took) == 10 and max(took) < 4.0


def test_a_refusal_is_shared_by_those_who_wait_for_a_session(
    make: Callable[..., Any], liar: Liar
) -> None:
    all_wait = threading.Event()

    def denied(_: dict[str, Any], __: socket.socket) -> Any:
        all_wait.wait(1.0)
        return 403, {"code": "denied", "detail": "no"}

    liar.lies["/v1/sessions"] = denied
    c = make(liar)
    told: list[str] = []

    def claim() -> None:
        with pytest.raises(palisade.Error) as error:
            c.lock("a", wait=5.0)
        told.append(error.value.code)

    claiming = [threading.Thread(target=claim, daemon=True) for _ in range(4)]
    for one in claiming:
        one.start()
    for one in claiming:
        one.join(LIMIT)
    assert told == ["denied"] * 4 and liar.heard.count("/v1/sessions") == 1


def test_a_gateway_that_hangs_leaves_time_for_the_next(make: Callable[..., Any], liar: Liar) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        liar.url = [f"http://127.0.0.1:{hanging.getsockname()[1]}", liar.url]  # type: ignore
        with make(liar, ttl=5.0) as c:
            assert c.lock("a", wait=1.0).valid


def keeps(text: str) -> Callable[..., Any]:
    return lambda body, _: (200, '{"claims":[%s]}' % ",".join(text % one for one in body["claims"]))


BAD = {
    "a number of 401 digits": keeps('{"id":"%%s","state":"held","token":"7","valid_ms":1%s}' % ("0" * 400)),
    "an infinite token": keeps('{"id":"%s","state":"held","token":1e999,"valid_ms":1800}'),
    "a token that is a list": keeps('{"id":"%s","state":"held","token":[],"valid_ms":1800}'),
    "deep JSON": lambda _, __: (200, "[" * 200_000),
    "no object": lambda _, __: (200, '{"claims":[[],1,"x"]}'),
}


def test_a_keeper_survives_any_answer(make: Callable[..., Any], liar: Liar) -> None:
    bad, turns = list(BAD.values()), 0

    def keep(body: dict[str, Any], there: socket.socket) -> Any:
        nonlocal turns
        turns += 1
        if turns % 2 == 0 and bad:
            return bad.pop()(body, there)
        return 200, {"claims": [held(one, valid_ms=8000) for one in body["claims"]]}

    liar.lies["/v1/sessions"] = lambda _, __: (201, {"ttl_ms": 8000})
    liar.lies["/v1/sessions/keepalive"] = keep
    # Each of them asks for a keep-alive at once.
    liar.lies["/v1/sessions/events"] = liar.drip(b"HTTP/1.1 200 OK\r\n\r\n", GAP)
    with make(liar, ttl=8.0) as c:
        hold = c.lock("a", wait=5.0)
        liar.until(lambda: not bad and turns > 2 * len(BAD))
        assert hold.valid


@pytest.mark.parametrize("bad", BAD)
def test_a_claim_with_a_bad_answer_is_an_error(make: Callable[..., Any], liar: Liar, bad: str) -> None:
    def claim(body: dict[str, Any], there: socket.socket) -> Any:
        status, text = BAD[bad]({"claims": [body["id"]]}, there)
        return status, text.removeprefix('{"claims":[').removesuffix("]}")

    liar.lies["/v1/claims"] = claim
    with make(liar, ttl=2.0) as c:
        (error,) = takes(4.0, lambda: c.lock("a", wait=2.0))
        assert not isinstance(error, (palisade.Unreachable, palisade.Busy))
        assert "/v1/claims/release" in liar.heard


def test_an_answer_instead_of_events_has_an_end(make: Callable[..., Any], liar: Liar) -> None:
    sent, given_up = 0, threading.Event()

    def endless(_: dict[str, Any], there: socket.socket) -> None:
        nonlocal sent
        try:
            there.sendall(b"HTTP/1.1 404 N\r\n\r\n")
            while sent < 256 << 20:
                sent += there.send(b"x" * (1 << 16))
        except OSError:
            pass
        given_up.set()

    liar.lies["/v1/sessions/events"] = endless
    with make(liar, ttl=2.0) as c:
        hold = c.lock("a", wait=5.0)
        assert given_up.wait(LIMIT) and sent < 32 << 20
        assert hold.valid


def test_an_answer_instead_of_events_is_not_unpacked(make: Callable[..., Any], liar: Liar) -> None:
    packed = threading.Event()

    def bomb(_: dict[str, Any], there: socket.socket) -> None:
        packed.set()
        text = gzip.compress(b"x" * 1000)
        there.sendall(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + text)

    liar.lies["/v1/sessions/events"] = bomb
    with make(liar, ttl=2.0) as c:
        hold = c.lock("a", wait=5.0)
        assert packed.wait(LIMIT) and hold.valid


@pytest.mark.parametrize("valid_ms", ["1e300", "1e999", "Infinity", "86400000"])
def test_a_promise_is_no_longer_than_the_session(
    make: Callable[..., Any], liar: Liar, valid_ms: str
) -> None:
    def claim(body: dict[str, Any], _: socket.socket) -> Any:
        text = '{"id":"%s","state":"held","token":"7","valid_ms":%s}'
        return 200, text % (body["id"], valid_ms)

    liar.lies["/v1/claims"] = claim
    with make(liar, ttl=2.0) as c:
        assert c.lock("a", wait=5.0).remaining() <= 2.0


@pytest.mark.parametrize(
    "lie",
    [{"id": "another"}, {"name": "another"}, {"valid_ms": True}, {"valid_ms": -1}, {"valid_ms": "9"},
     {"valid_ms": float("nan")}, {"token": True}, {"token": 1.5}, {"token": "-7"}],
    ids=str,
)
def test_what_is_no_answer_about_this_claim_is_an_error(
    make: Callable[..., Any], liar: Liar, lie: dict[str, Any]
) -> None:
    liar.lies["/v1/claims"] = lambda body, _: (200, {**held(body["id"]), **lie})
    with make(liar, ttl=2.0) as c:
        (error,) = takes(4.0, lambda: c.lock("a", wait=2.0))
        assert error.code == "unusable"


@pytest.mark.parametrize("ttl_ms", [1e-300, True, 0, -5, "2000", float("inf"), float("nan")])
def test_an_absurd_ttl_is_an_error(make: Callable[..., Any], liar: Liar, ttl_ms: Any) -> None:
    liar.lies["/v1/sessions"] = lambda _, __: (201, {"ttl_ms": ttl_ms})
    with make(liar, ttl=2.0) as c:
        (error,) = takes(4.0, lambda: c.lock("a", wait=2.0))
        assert error.code == "unusable"


def test_a_flood_of_gaps_is_no_flood_of_keep_alives(make: Callable[..., Any], liar: Liar) -> None:
    first = b"HTTP/1.1 200 OK\r\n\r\n"
    liar.lies["/v1/sessions/events"] = liar.drip(first, GAP, 0.002)
    with make(liar, ttl=2.0) as c:
        c.lock("a", wait=5.0)
        began = time.monotonic()
        liar.until(lambda: time.monotonic() > began + 1.0)
        took = time.monotonic() - began
        assert 2 < liar.heard.count("/v1/sessions/keepalive") < 15 * took


@pytest.mark.parametrize("code", ["lost", "evicted", "no_claim"])
def test_a_hold_that_cannot_be_amended_because_it_is_lost_ends(
    make: Callable[..., Any], liar: Liar, code: str
) -> None:
    liar.lies["/v1/claims/amend"] = lambda _, __: (410, {"code": code, "detail": "it is gone"})
    with make(liar, ttl=20.0) as c:
        hold = c.lock("a", wait=5.0)
        with pytest.raises(palisade.Lost):
            c.run(hold.hold.downgrade()) if hasattr(c, "run") else hold.downgrade()
        assert not hold.valid and hold.lost.wait(0.5)
