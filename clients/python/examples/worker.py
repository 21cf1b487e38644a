"""A worker that uses a gateway: charges each order of a table once, with any number of workers.

    palisade serve &
    python worker.py shop.db          # as many as you like

A lock for each order keeps two workers from charging it at once. It can't stop one that is paused
past its lease, so the table compares the fencing token in the statement that writes. A worker takes
an order before it reads it: after that no older holder can write, and what it reads stays true.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import time

import palisade

TABLE = "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, charges INTEGER DEFAULT 0, fence INTEGER DEFAULT 0)"


def open_orders(db: sqlite3.Connection) -> list[int]:
    return [order for (order,) in db.execute("SELECT id FROM orders WHERE charges = 0 ORDER BY id")]


def charge_card(order: int, seconds: float) -> None:
    """Stands in for a slow partner API."""
    time.sleep(seconds)


def take(db: sqlite3.Connection, order: int, token: int) -> int | None:
    """Raises the order's fence, then reads its charges; None if a newer holder has taken it."""
    with db:
        db.execute("UPDATE orders SET fence = ? WHERE id = ? AND fence < ?", (token, order, token))
        row = db.execute("SELECT charges FROM orders WHERE id = ? AND fence = ?", (order, token)).fetchone()
    return None if row is None else row[0]


def record(db: sqlite3.Connection, order: int, token: int) -> bool:
    """Records the charge; returns False if a newer holder has taken the order."""
    with db:
        changed = db.execute(
            "UPDATE orders SET charges = charges + 1 WHERE id = ? AND fence = ?", (order, token)
        )
    return changed.rowcount == 1


def work(client: palisade.Client, db: sqlite3.Connection, seconds: float) -> None:
    while orders := open_orders(db):
        for order in orders:
            try:
                with client.lock(f"orders/{order}", wait=0.1) as hold:
                    if take(db, order, hold.token) != 0:
                        continue
                    print(f"charging {order}", flush=True)
                    charge_card(order, seconds)
                    said = "charged" if record(db, order, hold.token) else "refused"
                    print(f"{said} {order}", flush=True)
            except palisade.Busy:
                continue  # another worker has this order
            except palisade.Lost:
                continue  # the fence of the table has already decided


def main() -> None:
    arguments = argparse.ArgumentParser(description="charges each order once")
    arguments.add_argument("database")
    arguments.add_argument("--ttl", type=float, default=30.0)
    arguments.add_argument("--takes", type=float, default=0.05, help="seconds for each charge")
    given = arguments.parse_args()
    db = sqlite3.connect(given.database, timeout=10)
    db.execute(TABLE)
    url = os.environ.get("PALISADE_URL", "http+unix:")
    token = os.environ.get("PALISADE_GATEWAY_TOKEN")
    with palisade.Client(url, token=token, ttl=given.ttl) as client:
        work(client, db, given.takes)


if __name__ == "__main__":
    main()
