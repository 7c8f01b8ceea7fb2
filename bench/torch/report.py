"""What `lastref.torch.report` takes on a million Python objects and 5,000 tensors: seconds, and what it leaves behind.

Runs without a GPU. Prints the median, the fastest and the slowest of the rounds.
"""

import argparse
import gc
import statistics
import sys
import time

import torch

from lastref.torch import report


class Node:
    def __init__(self, number: int) -> None:
        self.number, self.data = number, [number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--tensors", type=int, default=5_000)
    options = parser.parse_args()
    # Two for a node with its list, two for a dict with its list.
    kept = [Node(n) for n in range(options.objects * 7 // 20)], [{"k": [n]} for n in range(options.objects * 3 // 20)]
    tensors = [torch.zeros(100 + n) for n in range(options.tensors)]
    gc.collect()
    gc.disable()
    report()
    before = len(gc.get_objects()), sys.getallocatedblocks()
    seconds = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        report()
        seconds.append(time.perf_counter() - start)
    added = len(gc.get_objects()) - before[0], sys.getallocatedblocks() - before[1]
    print(
        f"report() on {before[0]:,} objects and {len(tensors):,} tensors: median {statistics.median(seconds):.2f} s, "
        f"{min(seconds):.2f} to {max(seconds):.2f}; left {added[0]} objects and {added[1]} blocks in {options.rounds} rounds"
    )
    del kept


if __name__ == "__main__":
    main()
