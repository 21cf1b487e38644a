"""A real gateway beside its description: requests that schemathesis makes up from the document.

Whatever is asked, right or wrong, the answer is one that the document has: its status, its type,
its fields. Never a 500, and nothing without a token that needs one. The two streams of events are
left out, since they do not end. `PALISADE_TEST_FULL=1` asks more than two thousand times.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import CHECKS

ROOT = Path(__file__).resolve().parents[4]
COMMAND = os.environ.get("PALISADE_COMMAND", str(ROOT / "target/debug/palisade"))
FULL = os.environ.get("PALISADE_TEST_FULL", "") not in ("", "0")
EXAMPLES = 160 if FULL else 8
# What would only be said of a description that promises more than a gateway can know, such as that
# every name that fits its schema is one that this principal may use.
LEFT_OUT = {"positive_data_acceptance", "negative_data_rejection", "missing_required_header"}

document = json.loads((ROOT / "crates/palisade-gateway/src/openapi.json").read_text())
schema = schemathesis.openapi.from_dict(document)
answers: Counter[tuple[str, int]] = Counter()


def by_status() -> Counter[int]:
    found: Counter[int] = Counter()
    for (_, status), count in answers.items():
        found[status] += count
    return found


class Gateway:
    def __init__(self, folder: Path) -> None:
        environment = {key: text for key, text in os.environ.items() if "PALISADE" not in key}
        environment["PALISADE_CONFIG"] = "/dev/null"
        self.process = subprocess.Popen(
            [
                COMMAND, "serve", "--json", "--url", f"file:{folder / 'store'}",
                "--socket", str(folder / "run" / "gateway.sock"), "--listen", "127.0.0.1:0",
                "--audit", str(folder / "audit.jsonl"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stderr is not None
        said = json.loads(self.process.stderr.readline())
        self.url: str = said["url"]
        self.token = Path(said["token_file"]).read_text().strip()
        self.random = random.Random(4711)
        self.session = self.open_session()

    def open_session(self) -> str:
        headers = {"Authorization": f"Bearer {self.token}"}
        answer = requests.post(f"{self.url}/v1/sessions", json={"ttl": "1h"}, headers=headers, timeout=30)
        return str(answer.json()["secret"])

    def alive(self) -> bool:
        return self.process.poll() is None


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"))
    yield gateway
    gateway.process.kill()
    asked = answers.total()
    print(f"\n{asked} requests; answers: {dict(sorted(by_status().items()))}")
    assert asked >= (2_000 if FULL else 200)
    # It was led on to where something happens.
    often = ("/v1/claims", "/v1/claims/release", "/v1/lines")
    for path in (*often, "/v1/evictions") if FULL else often:
        assert answers[path, 200] > 0, path


def lead_on(case: schemathesis.Case, gateway: Gateway) -> None:
    """Steers a request to where something happens: a real session, few names, short waits."""
    headers = case.headers if case.headers is not None else {}
    if gateway.random.random() < 0.7 and "/v1/" in case.path:
        headers["Palisade-Session"] = gateway.session
    case.headers = headers
    for part in (case.body, case.query):
        if not isinstance(part, dict):
            continue
        if "wait" in part and gateway.random.random() < 0.9:
            part["wait"] = gateway.random.choice(["0s", "1ms", "20ms"])
        if gateway.random.random() < 0.5 and isinstance(part.get("name"), str):
            part["name"] = gateway.random.choice(["a", "b", "permits/c"])
        # Asking a holder to let go waits for it, which nobody here does.
        if part.get("how") == "ask" and "name" in part:
            part["name"] = "nobody"
        if gateway.random.random() < 0.7 and isinstance(part.get("id"), str):
            part["id"] = gateway.random.choice(["1", "2", "3", "4", "5"])


@schema.exclude(path_regex="/events$").parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not FULL,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case: schemathesis.Case, gateway: Gateway) -> None:
    lead_on(case, gateway)
    checks = [check for check in CHECKS.get_all() if check.__name__ not in LEFT_OUT]
    headers = {"Authorization": f"Bearer {gateway.token}"}
    response = case.call(base_url=gateway.url, headers=headers, timeout=60)
    answers[case.path, response.status_code] += 1
    case.validate_response(response, checks=checks)
    assert gateway.alive()
    ours = (case.headers or {}).get("Palisade-Session") == gateway.session
    if ours and case.method == "DELETE" and response.status_code == 200:
        gateway.session = gateway.open_session()
