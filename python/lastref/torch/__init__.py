"""lastref under PyTorch: collect before failing, recover after failing, and say who holds the memory.

PyTorch's own allocator stays, with all its features. Nothing here needs a GPU to be imported, and
importing it changes nothing: `guard` does.

| name | what it is for |
|---|---|
| `guard`, `unguard` | dead cycles are collected before an allocation fails, and an error says what held the memory |
| `retry` | a step that runs out of memory is tried again, smaller, after its frames are gone |
| `holders`, `report`, `diff`, `watch` | who holds it, and what has grown |
| ``python -m lastref.torch PROGRAM`` | a program, guarded, with a report if it dies |
| ``%load_ext lastref.torch`` | ``%gpu_memory`` in IPython and notebooks |
| `lastref.torch.metrics` | numbers for Prometheus |

Each is imported when it is first asked for.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._guard import Guard, guard, guard_stats, is_guarded, unguard
    from ._ipython import load_ipython_extension, unload_ipython_extension
    from ._report import Report, diff, holders, report, watch
    from ._retry import retry

if importlib.util.find_spec("torch") is None:
    raise ImportError("lastref.torch works on PyTorch, which is not installed: pip install torch")

_WHERE = {
    "Guard": "_guard",
    "Report": "_report",
    "diff": "_report",
    "guard": "_guard",
    "guard_stats": "_guard",
    "holders": "_report",
    "is_guarded": "_guard",
    "load_ipython_extension": "_ipython",
    "report": "_report",
    "retry": "_retry",
    "unguard": "_guard",
    "unload_ipython_extension": "_ipython",
    "watch": "_report",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{where}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
