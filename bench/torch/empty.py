"""Python's time to make a tensor on a device and drop it: lastref's ``empty`` beside torch's.

One process, the two taking turns of a few milliseconds, so that whatever the machine does meanwhile falls on both; the
time is the thread's own. Prints the medians as JSON. Run by ``cargo xtask bench alloc --torch ENV``.
"""

import argparse
import gc
import json
import statistics
import time

import lastref
import torch


def turn(empty, count: int) -> float:
    """Nanoseconds for one."""
    numbers = [None] * count
    start = time.thread_time_ns()
    for _ in numbers:
        empty(1024, device="cuda")
    return (time.thread_time_ns() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--count", type=int, default=2_000, help="tensors a turn")
    arguments = parser.parse_args()
    samples: dict[object, list[float]] = {lastref.empty: [], torch.empty: []}
    gc.disable()
    for empty in samples:
        turn(empty, arguments.count)
    for number in range(arguments.rounds):
        for empty in sorted(samples, key=lambda empty: (empty is torch.empty) ^ (number % 2)):
            samples[empty].append(turn(empty, arguments.count))
    gc.enable()
    report = {
        "torch": torch.__version__,
        "python_empty_ns": statistics.median(samples[lastref.empty]),
        "torch_empty_ns": statistics.median(samples[torch.empty]),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
