"""Memory snapshots: what a GPU's memory looked like, and what happened before.

`read` reads the files that ``torch.cuda.memory._dump_snapshot`` writes, of any version of PyTorch, without running
anything in them and without PyTorch; also their JSON, and lastref's allocation traces. The command ``lastref`` does the
same from a shell: ``lastref stats``, ``lastref explain``, ``lastref diff``.

`advise` tries what a program allocated under other settings of PyTorch's allocator, as ``lastref advise`` does.
"""

import json
import os
import pickle
from collections.abc import Iterable
from typing import Any

from . import _lastref

__all__ = ["Snapshot", "advise", "read"]


class Snapshot:
    """A memory snapshot. `read` makes one."""

    __slots__ = ("_inner", "_path")

    def __init__(self, inner: _lastref.Snapshot, path: str) -> None:
        self._inner = inner
        self._path = path

    def __repr__(self) -> str:
        return f"<lastref.snapshot.Snapshot of {self._path!r}>"

    def stats(self) -> dict[str, Any]:
        """The figures of ``lastref stats --json``: what each device holds, and each history's levels and peak."""
        stats: dict[str, Any] = json.loads(self._inner.stats_json())
        return stats

    def explain(self, capacity_bytes: int | None = None) -> list[dict[str, Any]]:
        """For each device, what holds the memory at its peak, or when an allocation failed, and why it did.

        ``capacity_bytes`` is the size of the device: with it, what others use is known too.
        """
        devices: list[dict[str, Any]] = json.loads(self._inner.explain_json(capacity_bytes))
        return devices

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as ``torch.cuda.memory._snapshot()`` gives it."""
        # These bytes are ours: plain data, whatever was in the file.
        snapshot: dict[str, Any] = pickle.loads(self._inner.pickle())
        return snapshot

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes it as PyTorch does: a file that ``torch.cuda._memory_viz`` opens."""
        self._inner.write(os.fspath(path))


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a memory snapshot, or an allocation trace; plain or compressed with gzip.

    Raises ``OSError`` if the file cannot be read, ``ValueError`` if it is something else, cut or made to harm: the
    text says where and why.
    """
    path = os.fspath(path)
    return Snapshot(_lastref.snapshot_read(path), path)


def advise(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    capacity_bytes: int | None = None,
    settings: Iterable[str] = (),
) -> dict[str, Any]:
    """Tries a program's allocations under other settings of PyTorch's allocator: ``lastref advise --json``.

    ``paths`` are memory snapshots with a history, or allocation traces, one or several; of several, the one that
    takes most decides. With ``capacity_bytes``, the size of the device, only settings that complete there are named.
    ``settings`` are tried too, each as in ``PYTORCH_CUDA_ALLOC_CONF``.

    In the dict, ``recommended`` is None if no setting completes, else ``settings`` and ``line``, the line to
    paste; the line is None where the defaults are best. ``files`` has for each program what was ``tried`` (with
    ``peak_reserved_bytes``, ``smallest_bytes``, ``device_allocations``, ``completes``), its own ``recommended`` and what is
    ``unknown``, in words.

    It takes all processors, and other threads of Python run meanwhile. Ctrl-C ends it.

    Raises ``OSError`` if a file cannot be read, ``ValueError`` if it is something else or has no history, or a setting is
    wrong, ``RuntimeError`` if a replay failed.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    # The command takes - for standard input.
    names = ["./-" if os.fspath(path) == "-" else os.fspath(path) for path in paths]
    if isinstance(settings, str):
        raise TypeError("advise: settings must be a list of texts, got one text")
    advice: dict[str, Any] = json.loads(_lastref.snapshot_advise(names, capacity_bytes, list(settings)))
    return advice
