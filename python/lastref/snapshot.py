"""Memory snapshots: what a GPU's memory looked like, and what happened before.

`read` reads the files that ``torch.cuda.memory._dump_snapshot`` writes, of any version of PyTorch, without running
anything in them and without PyTorch; also their JSON, and lastref's allocation traces. The command ``lastref`` does the
same from a shell: ``lastref stats``, ``lastref explain``, ``lastref diff``.
"""

import json
import os
import pickle
from typing import Any

from . import _lastref

__all__ = ["Snapshot", "read"]


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
