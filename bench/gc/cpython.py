"""What CPython's collector takes for the same work; called by the benchmark.

Prints, as JSON, the samples of each row named on the command line that makes sense here.
"""

import gc
import json
import sys
import time

NODES = 1_000_000
OPERATIONS = 1_000_000


class Node:
    __slots__ = ("edge", "number")

    def __init__(self, number):
        self.edge = None
        self.number = number


def pair():
    first, second = Node(1), Node(2)
    first.edge, second.edge = second, first
    return first


def collect(generation=2):
    started = time.perf_counter()
    gc.collect(generation)
    return (time.perf_counter() - started) * 1e3


def alloc_drop():
    started = time.perf_counter()
    for number in range(OPERATIONS):
        Node(number)
    return (time.perf_counter() - started) / OPERATIONS * 1e9


def pairs():
    for _ in range(NODES // 2):
        pair()
    return collect()


def ring():
    first = last = Node(0)
    for number in range(1, NODES):
        node = Node(number)
        node.edge = last
        last = node
    first.edge = last
    del first, last, node
    return collect()


def beside_live():
    live = [pair() for _ in range(NODES // 2)]
    gc.collect()
    for _ in range(1000):
        pair()
    taken = collect()
    live.clear()
    gc.collect()
    return taken


ROWS = {
    "alloc + drop, in no cycle": alloc_drop,
    "collect 1e6 dead in pairs": pairs,
    "collect a dead ring of 1e6": ring,
    "1000 dead pairs, 1e6 live": beside_live,
}

if __name__ == "__main__":
    rounds, wanted = int(sys.argv[1]), sys.argv[2:]
    gc.disable()
    found = {name: [measure() for _ in range(rounds)] for name, measure in ROWS.items() if name in wanted}
    print(json.dumps(found))
