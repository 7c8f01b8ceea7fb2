"""The simulated GPU: real memory of the host behind a device that behaves as a GPU does.

It stands in for a GPU only when asked for, here or by the environment variable ``LASTREF_SIM``, and
says so once on standard error. Its memory costs what is touched: an 80 GiB device is free.
"""

from . import _lastref

__all__ = ["enable", "is_enabled"]


def enable(spec: str) -> None:
    """Makes simulated GPUs the CUDA devices of this process.

    ``spec`` says how many and how large: ``"8GiB"``, ``"2x8GiB"``, ``"11GB"``, ``"11000MiB"``. Call
    it before anything in `lastref.cuda` has been used.

    Raises:
        ValueError: ``spec`` is not such a text.
        RuntimeError: the devices of this process are already set up.
    """
    _lastref.sim_enable(spec)


def is_enabled() -> bool:
    """Whether the CUDA devices of this process are simulated."""
    return _lastref.sim_is_enabled()
