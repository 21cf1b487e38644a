"""The example worker, with other workers and one that is stopped; the code of the README."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, Gateway

PYTHON = ROOT / "clients/python"


def orders(path: Path, count: int) -> sqlite3.Connection:
    sys.path.insert(0, str(PYTHON / "examples"))
    import worker

    db = sqlite3.connect(path, timeout=10)
    with db:
        db.execute(worker.TABLE)
        db.executemany("INSERT INTO orders (id) VALUES (?)", [(id,) for id in range(1, count + 1)])
    return db


def start(gateway: Gateway, path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PALISADE_URL": gateway.url, "PALISADE_GATEWAY_TOKEN": gateway.token}
    environment["PYTHONPATH"] = str(PYTHON / "src")
    command = [sys.executable, str(PYTHON / "examples/worker.py"), str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def said(worker: subprocess.Popen[str]) -> list[str]:
    out, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0
    return out.splitlines()


def test_workers_charge_each_order_once(gateway: Gateway, tmp_path: Path) -> None:
    db = orders(tmp_path / "shop.db", 6)
    lines = [line for w in [start(gateway, tmp_path / "shop.db") for _ in range(3)] for line in said(w)]
    assert sorted(line for line in lines if line.startswith("charged")) == [f"charged {n}" for n in range(1, 7)]
    assert not any(line.startswith("refused") for line in lines)
    assert db.execute("SELECT count(*), sum(charges) FROM orders").fetchone() == (6, 6)


def test_a_worker_that_was_stopped_is_refused_by_the_table(gateway: Gateway, tmp_path: Path) -> None:
    db = orders(tmp_path / "shop.db", 1)
    first = start(gateway, tmp_path / "shop.db", "--ttl", "1", "--takes", "0.2")
    assert first.stdout is not None and first.stdout.readline() == "charging 1\n"
    first.send_signal(signal.SIGSTOP)
    try:
        assert said(start(gateway, tmp_path / "shop.db")) == ["charging 1", "charged 1"]
    finally:
        first.send_signal(signal.SIGCONT)
    assert said(first) == ["refused 1"]
    assert db.execute("SELECT charges FROM orders").fetchone() == (1,)


def test_a_late_write_beside_one_that_has_read_is_refused(gateway: Gateway, tmp_path: Path) -> None:
    db = orders(tmp_path / "shop.db", 1)
    first = start(gateway, tmp_path / "shop.db", "--ttl", "1", "--takes", "0.2")
    assert first.stdout is not None and first.stdout.readline() == "charging 1\n"
    first.send_signal(signal.SIGSTOP)
    second = start(gateway, tmp_path / "shop.db", "--takes", "2")
    try:
        # It has read the order, and has not written yet.
        assert second.stdout is not None and second.stdout.readline() == "charging 1\n"
    finally:
        first.send_signal(signal.SIGCONT)
    assert said(first) == ["refused 1"]
    assert said(second) == ["charged 1"]
    assert db.execute("SELECT charges FROM orders").fetchone() == (1,)


def test_the_lines_of_the_readme_run(gateway: Gateway) -> None:
    text = (PYTHON / "README.md").read_text()
    block = text.split("```python\n")[1].split("```")[0]
    assert "https://locks.example.com" in block
    charged: list[int] = []
    names = {"token": gateway.token, "card": 4711}
    names["charge"] = lambda card, fencing_token: charged.append(fencing_token)
    exec(block.replace("https://locks.example.com", gateway.url), names)
    assert len(charged) == 1 and charged[0] > 0
