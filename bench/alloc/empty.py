"""Nanoseconds that `lastref.empty(1024, device="cuda")` takes, created and dropped; called by the benchmark."""

import statistics
import time

import lastref

PAIRS = 5_000
GOES = 7


def go():
    empty = lastref.empty
    started = time.perf_counter()
    for _ in range(PAIRS):
        empty(1024, device="cuda")
    return (time.perf_counter() - started) / PAIRS * 1e9


go()
print(statistics.median(go() for _ in range(GOES)))
