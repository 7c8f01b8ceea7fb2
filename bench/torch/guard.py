"""What `lastref.torch.guard` costs: the time of ``torch.empty`` on a device, guarded beside native.

One process, the two taking turns of some milliseconds, so that what the machine does meanwhile falls on both;
the time is the thread's own. Run by ``cargo xtask bench torch``; runs on a GPU too. Prints the median of the rounds'
ratios, with the quartiles, and nanoseconds.
"""

import argparse
import gc
import statistics
import time

import torch

import lastref.torch


def nanoseconds(size: int, count: int) -> float:
    """Mean time to make a tensor and drop it."""
    empty = torch.empty
    start = time.thread_time_ns()
    for _ in range(count):
        empty(size, device="cuda")
    return (time.thread_time_ns() - start) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--count", type=int, default=2_000, help="tensors a round")
    arguments = parser.parse_args()

    with lastref.torch.guard(report=False) as guard:
        if guard.mode != "retry":
            raise SystemExit(f"not guarded: {guard.why}")
    nanoseconds(1024, arguments.count)
    print("elements  native ns  guarded ns    ratio   (quartiles of the rounds)")
    # A block of the small pool, one of the large, and one that the growth check sees often.
    for size in (1024, 1 << 20, 16 << 20):
        native, guarded, ratios = [], [], []
        gc.disable()
        for number in range(arguments.rounds):
            # Who goes first changes, so that a clock that slows down favours neither.
            for turn in range(2):
                if (turn + number) % 2:
                    native.append(nanoseconds(size, arguments.count))
                else:
                    with lastref.torch.guard(report=False):
                        guarded.append(nanoseconds(size, arguments.count))
            ratios.append(guarded[-1] / native[-1])
        gc.enable()
        quarter = len(ratios) // 4
        ratios.sort()
        print(
            f"{size:8d} {statistics.median(native):10.1f} {statistics.median(guarded):11.1f} "
            f"{statistics.median(ratios):8.4f}   ({ratios[quarter]:.3f} .. {ratios[-1 - quarter]:.3f})"
        )


if __name__ == "__main__":
    main()
