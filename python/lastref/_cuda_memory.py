"""`lastref.cuda.memory`: what ``torch.cuda.memory`` has beside ``torch.cuda``'s own functions."""

import os

from . import _lastref


def _dump_snapshot(filename: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    """Writes what the allocators of all devices hold, and their histories, to a file.

    The file is a pickle in PyTorch's form, for ``lastref explain``, ``torch.cuda._memory_viz`` and
    https://pytorch.org/memory_viz. Histories are recorded with the setting ``history_entries``.
    """
    _lastref.cuda_dump_snapshot(os.fspath(filename))
