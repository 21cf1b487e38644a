#!/usr/bin/env python3
"""What the short Redis scripts and the push that grants save, with and without in one run.

Starts a `redis-server` of its own and speaks RESP over a plain socket, so that the figures are
the server's and not a client library's. Needs nothing but Python.
"""

import pathlib
import re
import socket
import statistics
import subprocess
import tempfile
import time

LUA = pathlib.Path(__file__).parent / "../../palisade/src/engines/redis/lua"
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


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            run(port)
        finally:
            process.terminate()
            process.wait()


def run(port):
    while True:
        try:
            server = Connection(port)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)

    def load(*files):
        parts = [(LUA / f"{file}.lua").read_text() for file in ("head", *files)]
        return server.call("SCRIPT", "LOAD", "".join(parts))

    short = {"enter": "enter_free", "leave": "leave_free", "renew": "renew_whole"}
    variants = {
        "with": {verb: load(file, "line", verb) for verb, file in short.items()},
        "without": {verb: load("line", verb) for verb in short},
    }
    figures = {}
    for number in range(15):
        claims = [f"{number * 1000 + claim:032x}" for claim in range(64)]
        for variant in sorted(variants, reverse=number % 2 == 0):
            measure(
                server, variants[variant], claims,
                lambda what, us, v=variant: figures.setdefault(what, {}).setdefault(v, []).append(us),
            )
    waiter = Connection(port)
    waiter.call("SUBSCRIBE", f"palisade:wake:{CHANNEL}")
    pushed, looked = hand_over(server, waiter, variants["with"], load("line", "look"))
    figures["hand-over, push is the grant"] = {"with": pushed, "without": looked}
    for what, of in figures.items():
        kept, removed = (statistics.median(of[variant]) for variant in ("with", "without"))
        print(f"{what:36} with {kept:6.1f} us  without {removed:6.1f} us  {removed / kept:.2f}x")


if __name__ == "__main__":
    main()
