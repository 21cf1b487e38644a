"""Real gateways: the built command, each with its own store or a shared one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Callable, Iterator

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMAND = os.environ.get("PALISADE_COMMAND", str(ROOT / "target/debug/palisade"))


class Gateway:
    def __init__(self, store: Path, socket: Path) -> None:
        environment = {key: text for key, text in os.environ.items() if "PALISADE" not in key}
        environment["PALISADE_CONFIG"] = "/dev/null"
        self.process = subprocess.Popen(
            [
                COMMAND, "serve", "--json", "--url", f"file:{store}", "--socket", str(socket),
                "--listen", "127.0.0.1:0", "--drain", "5s",
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stderr is not None
        said = json.loads(self.process.stderr.readline())
        self.url: str = said["url"]
        self.unix = f"http+unix:{socket}"
        self.token = Path(said["token_file"]).read_text().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Gateway]]:
    started: list[Gateway] = []

    def start() -> Gateway:
        socket = tmp_path / f"run{len(started)}" / "gateway.sock"
        started.append(Gateway(tmp_path / "store", socket))
        return started[-1]

    yield start
    for gateway in started:
        if gateway.process.poll() is None:
            gateway.signal(signal.SIGCONT)
            gateway.kill()


@pytest.fixture
def gateway(start: Callable[[], Gateway]) -> Gateway:
    return start()
