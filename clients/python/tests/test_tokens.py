"""Tokens that can't be sent: they are refused at once, and never shown."""

from __future__ import annotations

import traceback
from typing import Any, Callable

import httpx
import pytest

import palisade
from conftest import Gateway
from palisade import _protocol as protocol


@pytest.mark.parametrize("kind", [palisade.Client, palisade.AsyncClient])
@pytest.mark.parametrize(
    "token", ["SES\x00AME", "SES\nAME", "SES\x7fAME", "SESÁME", "SESAME\u2028x", " \n", b"SESAME"], ids=ascii
)
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(kind: Any, token: Any) -> None:
    with pytest.raises(ValueError) as told:
        kind("http://127.0.0.1:9", token=token)
    assert "token" in str(told.value) and "SES" not in str(told.value)


def test_whitespace_around_a_token_is_stripped(make: Callable[..., Any], gateway: Gateway) -> None:
    gateway.token = f" {gateway.token}\r\n"
    with make(gateway) as c:
        c.lock("a", wait=5.0).release()


def test_what_httpx_refuses_to_send_is_not_shown_nor_tried_again(
    make: Callable[..., Any], gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def headers(_: Any) -> dict[str, str]:
        tried.append(protocol.now())
        return {"Authorization": "Bearer SESAME\n"}

    monkeypatch.setattr(protocol.Settings, "headers", headers)
    with make(gateway) as c:
        began = protocol.now()
        with pytest.raises(palisade.Error) as told:
            c.lock("a", wait=10.0)
    assert not isinstance(told.value, palisade.Unreachable) and protocol.now() - began < 5.0
    assert "SESAME" not in "".join(traceback.format_exception(told.value))
    assert isinstance(protocol.unreachable(httpx.LocalProtocolError("SESAME")), palisade.Error)
