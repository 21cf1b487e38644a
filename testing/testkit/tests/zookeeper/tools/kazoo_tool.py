# kazoo's locks, told what to do line by line: VERB PATH [MILLIS], answered with yes or no.
# "lock" looks for Curator's names too, "plain" for its own alone.

import sys
import time

from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout

client = KazooClient(hosts=sys.argv[1], timeout=15)
client.start()
print("ready", flush=True)
locks = {}
for line in sys.stdin:
    verb, path, *rest = line.split()
    path = "/" + path
    if verb == "bench":
        lock = client.Lock(path, extra_lock_patterns=["-lock-"])
        begin, count = time.time(), 0
        while time.time() < begin + int(rest[0]) / 1000:
            lock.acquire()
            lock.release()
            count += 1
        print(count / (time.time() - begin), flush=True)
        continue
    if verb == "unlock":
        locks.pop(path).release()
        print("yes", flush=True)
        continue
    patterns = ["-lock-"] if verb == "lock" else []
    lock = client.Lock(path, "tool", extra_lock_patterns=patterns)
    try:
        done = lock.acquire(timeout=int(rest[0]) / 1000)
    except LockTimeout:
        done = False
    if done:
        locks[path] = lock
    print("yes" if done else "no", flush=True)
