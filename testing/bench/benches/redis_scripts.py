#!/usr/bin/env python3
"""What the short Redis scripts and the push that grants save, with and without in one run.

Starts servers of its own, one for `redis:` and five for `redlock:`, and speaks RESP over plain
sockets, so that the figures are the servers' and not a client library's. Needs nothing but Python
and `redis-server`.
"""

import pathlib
import re
import socket
import statistics
import subprocess
import tempfile
import time

LUA = pathlib.Path(__file__).parent / "../../../engines/redis/src/lua"
CHANNEL = "c" * 32
TAIL = f' 30000 0 {CHANNEL} {{"owner":"0123456789abcdef","host":"machine","pid":12345}}'


class Connection:
    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = self.socket.makefile("rb")

    def send(self, *calls):
        text = b""
        for call in calls:
            words = [str(word).encode() for word in call]
            text += b"*%d\r\n" % len(words)
            text += b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self.socket.sendall(text)

    def read(self):
        line = self.reader.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        if kind in b"+:":
            return rest.decode()
        if kind == b"*":
            return [self.read() for _ in range(int(rest))]
        return None if rest == b"-1" else self.reader.read(int(rest) + 2)[:-2].decode()

    def call(self, *words):
        self.send(words)
        return self.read()

    def pipeline(self, calls):
        self.send(*calls)
        return [self.read() for _ in calls]


def on_line(script, number, *arguments):
    key = f"palisade:x{number}"
    return ("EVALSHA", script, 2, key, f"{{{key}}}:palisade", *arguments)


def enter(scripts, number, claim):
    return on_line(scripts["enter"], number, claim, "0 0 1 30002", TAIL)


def token(answer):
    return answer.split()[2]


def measure(server, scripts, claims, note):
    def stats(what, calls):
        server.call("CONFIG", "RESETSTAT")
        answers = server.pipeline(calls)
        found = re.search(r"cmdstat_evalsha:calls=(\d+),usec=(\d+)", server.call("INFO", "commandstats"))
        note(what, int(found[2]) / int(found[1]))
        return answers

    names = range(len(claims))
    granted = stats("enter, on the server", [enter(scripts, n, claims[n]) for n in names])
    tokens = [token(answer) for answer in granted]
    for verb in ("renew", "leave"):
        calls = [on_line(scripts[verb], n, claims[n], tokens[n]) for n in names]
        stats(f"{verb}, on the server", calls)
    began, rounds = time.perf_counter(), 300
    for _ in range(rounds):
        held = token(server.call(*enter(scripts, 0, claims[0])))
        server.call(*on_line(scripts["leave"], 0, claims[0], held))
    note("lock and release, one task", (time.perf_counter() - began) / rounds * 1e6)
    began, rounds = time.perf_counter(), 20
    for _ in range(rounds):
        granted = server.pipeline([enter(scripts, n, claims[n]) for n in names])
        server.pipeline([on_line(scripts["leave"], n, claims[n], token(granted[n])) for n in names])
    note("lock and release, 64 names at once", (time.perf_counter() - began) / rounds / len(claims) * 1e6)


def measure_votes(servers, scripts, claims, proposal, note):
    """As `measure`, on a majority: every server is asked, and all are waited for."""

    def ask_all(calls):
        for server in servers:
            server.send(*calls)
        return [[server.read() for _ in calls] for server in servers]

    def cycle(names):
        ask = [(f"v{n}", claims[n], "0 0 30002", TAIL, proposal) for n in names]
        votes = ask_all([on_line(scripts["vote"], *one) for one in ask])
        assert all("held" in vote for vote in sum(votes, [])), votes
        back = ask_all([on_line(scripts["retract"], f"v{n}", claims[n], proposal) for n in names])
        assert all(answer.endswith("left") for answer in sum(back, [])), back

    for what, names, rounds in (("one task", range(1), 200), ("64 names at once", range(len(claims)), 15)):
        began = time.perf_counter()
        for _ in range(rounds):
            cycle(names)
            proposal += 1
        took = (time.perf_counter() - began) / rounds / len(names)
        note(f"redlock, lock and release, {what}", took * 1e6)
    return proposal


def hand_over(server, waiter, scripts, look):
    """From the release to the waiter's knowledge: by the push alone, and by a look after it."""
    pushed, looked = [], []
    for number in range(2000):
        first, second = f"{2 * number + 1:032x}", f"{2 * number + 2:032x}"
        held = token(server.call(*enter(scripts, "h", first)))
        assert "waiting" in server.call(*enter(scripts, "h", second))
        began = time.perf_counter()
        server.call(*on_line(scripts["leave"], "h", first, held))
        granted = waiter.read()[2].split()[1]
        pushed.append((time.perf_counter() - began) * 1e6)
        assert "held" in server.call(*on_line(look, "h", second))
        looked.append((time.perf_counter() - began) * 1e6)
        server.call(*on_line(scripts["leave"], "h", second, granted))
    return pushed, looked


def start(folder):
    """A server, and a connection to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            return process, port, Connection(port)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise SystemExit("redis-server does not start")


def main():
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for _ in range(5):
                started.append(start(folder))
            run(started[0][1], [server for _, _, server in started])
        finally:
            for process, _, _ in started:
                process.terminate()
                process.wait()


def run(port, servers):
    def load(*files):
        parts = [(LUA / f"{file}.lua").read_text() for file in ("head", *files)]
        return [server.call("SCRIPT", "LOAD", "".join(parts)) for server in servers][0]

    server = servers[0]
    short = {
        "enter": "enter_free",
        "leave": "leave_free",
        "renew": "renew_whole",
        "vote": "vote_free",
        "retract": "retract_free",
    }
    variants = {
        "with": {verb: load(file, "line", verb) for verb, file in short.items()},
        "without": {verb: load("line", verb) for verb in short},
    }
    proposal = int(time.time() * 1e6)
    figures = {}
    for number in range(15):
        claims = [f"{number * 1000 + claim:032x}" for claim in range(64)]
        for variant in sorted(variants, reverse=number % 2 == 0):
            def note(what, us, variant=variant):
                figures.setdefault(what, {}).setdefault(variant, []).append(us)

            measure(server, variants[variant], claims, note)
            proposal = measure_votes(servers, variants[variant], claims, proposal, note)
    waiter = Connection(port)
    waiter.call("SUBSCRIBE", f"palisade:wake:{CHANNEL}")
    pushed, looked = hand_over(server, waiter, variants["with"], load("line", "look"))
    figures["hand-over, push is the grant"] = {"with": pushed, "without": looked}
    for what, of in figures.items():
        kept, removed = (statistics.median(of[variant]) for variant in ("with", "without"))
        print(f"{what:44} with {kept:6.1f} us  without {removed:6.1f} us  {removed / kept:.2f}x")


if __name__ == "__main__":
    main()
