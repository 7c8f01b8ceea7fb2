"""The simulated GPU: real memory of the host behind a device that behaves as a GPU does.

It stands in for a GPU only when asked for, here or by the environment variable ``LASTREF_SIM``, and
says so once on standard error. Its memory costs what is touched: an 80 GiB device is free.

With ``LASTREF_SIM=8GiB,races=true``, or ``enable("8GiB", races=True)``, it looks for uses of memory that
nothing puts in order. What it found is printed to standard error at the end of the process.
"""

import atexit
import sys

from . import _lastref

__all__ = ["enable", "is_enabled", "races"]


def enable(spec: str, *, races: bool = False) -> None:
    """Makes simulated GPUs the CUDA devices of this process.

    ``spec`` says how many and how large: ``"8GiB"``, ``"2x8GiB"``, ``"11GB"``, ``"11000MiB"``. With
    ``races`` they look for races, as with ``"8GiB,races=true"``. Call it before anything in `lastref.cuda`
    has been used.

    Raises:
        ValueError: ``spec`` is not such a text.
        RuntimeError: the devices of this process are already set up.
    """
    _lastref.sim_enable(f"{spec},races=true" if races else spec)


def races() -> list[str]:
    """The races that were found so far: what happened, on which streams, and the cure."""
    return _lastref.sim_races()


def _print_races() -> None:
    for race in races():
        print(f"lastref: {race}", file=sys.stderr)


atexit.register(_print_races)


def is_enabled() -> bool:
    """Whether the CUDA devices of this process are simulated."""
    return _lastref.sim_is_enabled()
