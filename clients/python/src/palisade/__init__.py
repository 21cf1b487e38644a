"""Distributed locks with fencing tokens, through a palisade gateway.

    with palisade.Client("http://127.0.0.1:7420", token=...).lock("billing/card-4711") as hold:
        charge(card, fencing_token=hold.token)
        hold.check()

:class:`Client` blocks; :class:`AsyncClient` is the same for asyncio.
"""

from ._aio import AsyncClient, AsyncHold
from ._protocol import Busy, Error, Lost, Unreachable
from ._sync import Client, Hold

__all__ = [
    "AsyncClient",
    "AsyncHold",
    "Busy",
    "Client",
    "Error",
    "Hold",
    "Lost",
    "Unreachable",
]
