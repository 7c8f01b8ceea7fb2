"""What holds the memory: `report`, `holders`, `diff`, `watch`.

The search reads Python's heap (`lastref._lastref.Heap`), the autograd graph and the allocator's
segments, and keeps none of it: when it returns, it refers to nothing. It allocates no device memory, and
adds nothing to the heap but what PyTorch makes when it is asked: a Python object for a gradient, or for a node or a
tensor of the autograd graph, that had none, which stays as long as that does.
While it runs it holds references to what it looks at, so an object that another thread lets go of
meanwhile is freed when it ends.
"""

import contextlib
import gc
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

import torch

from .. import __version__ as _version
from .._lastref import Heap
from . import _html, _memory, _text
from ._autograd import Graph
from ._holders import CURES, OWN_FILES, Path, describe, describe_cycle, finish, isinstance_plain, plain, short_name, type_name
from ._memory import Held, Storages

__all__ = ["Difference", "Holders", "Report", "diff", "for_out_of_memory", "holders", "report", "watch"]

SCHEMA = "lastref.report/1"
MAX_PATHS = 10
MAX_EDGES = 200_000_000

_Item = TypeVar("_Item")


class Report:
    """Who held the memory at one moment. It refers to no tensor.

    `to_dict` gives a dict of these, and of nothing else; sizes are in bytes, times in seconds:

    | key | what it is |
    |---|---|
    | ``schema`` | ``"lastref.report/1"``; keys are only added while the number stays |
    | ``time`` | seconds since 1970 |
    | ``host``, ``pid``, ``rank``, ``program`` | who: the rank is None outside a process group |
    | ``torch``, ``lastref`` | versions |
    | ``devices`` | for each CUDA device in use a dict of ``index``, ``name``, ``total``, ``free``, ``live``, ``cached``, ``pending``, ``fragmented``, ``context``, ``other_processes``, ``largest_hole``, ``cures`` |
    | ``out_of_memory`` | None, or a dict of ``device``, ``requested``, ``message``, ``rungs``: dicts of ``name``, ``bytes``, ``microseconds`` |
    | ``storages`` | the heaviest, each a dict as below |
    | ``totals`` | for each device's name the ``bytes`` and ``storages`` that were found, shown or not |
    | ``native_unknown`` | ``bytes`` and ``blocks`` of live device memory in which no tensor was found |
    | ``autograd`` | the largest graphs: ``result`` (words), ``nodes``, ``bytes`` of the storages among the shown that it keeps |
    | ``notes`` | sentences on what the search was not able to see |
    | ``truncated`` | whether the search stopped for want of time |
    | ``objects``, ``seconds`` | how many Python objects were looked at, and how long all took |

    A device's ``total`` is ``free`` + ``live`` + ``cached`` + ``pending`` + ``fragmented`` +
    ``context`` + ``other_processes``. Live: given out. Cached: whole segments or pages that are free in
    PyTorch's cache. Pending: freed, but another stream may still use it. Fragmented: free parts of
    segments that are partly in use. Context: everything of this process that PyTorch's allocator knows
    nothing of, such as the CUDA context and libraries; it includes other processes where NVML does not
    tell, and ``other_processes`` is None then. ``largest_hole`` is the largest free block in the cache.

    A storage has ``bytes``, ``used_bytes`` (of the largest tensor on it), ``device``, ``dtype``,
    ``shape``, ``requires_grad``, ``is_parameter``, ``tensors`` (Python objects on it), ``view`` (None,
    or words on a view that uses little of it), ``paths``, ``cycle`` (None, or ``words``,
    ``collectable`` and ``objects``) and ``cure``. A path has ``words``, ``kind``, ``steps`` and
    ``cure``; paths are shortest first. A step has ``text``, ``kind`` and ``type``; one that is a
    frame's also ``file``, ``line`` and ``function``.

    Kinds of paths: ``variable``, ``thread`` (a variable on another thread), ``module global``,
    ``registry`` (a global container), ``module attribute`` (of a ``torch.nn.Module``), ``class attribute``,
    ``closure``, ``default argument``, ``partial``, ``lru_cache``, ``generator``, ``thread local``, ``queue``,
    ``logging``, ``future``, ``context variable``, ``finalizer``, ``optimizer``, ``hook``, ``gradient``,
    ``autograd``, ``dlpack``, ``array``, ``exception``, ``last traceback``, ``prompt``, ``garbage``,
    ``object`` (none of these), and where no way was found ``native``: nothing that Python shows holds it;
    ``in progress``: an allocation failed, and only a call that runs seems to hold it; ``late``: time was over.

    >>> import torch
    >>> from lastref.torch import report
    >>> weights = torch.zeros(3000, 1000)
    >>> data = report().to_dict()
    >>> data["schema"], data["storages"][0]["shape"]
    ('lastref.report/1', [3000, 1000])
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers: a copy."""
        copied: dict[str, Any] = json.loads(self.to_json())
        return copied

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self._data, indent=1)

    def to_html(self) -> str:
        """The report as one page that needs nothing else, with the paths drawn."""
        return _html.page(self._data)

    def text(self, color: bool = False) -> str:
        """The report for a terminal."""
        return _text.report_text(self._data, color)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<lastref.torch.Report of {len(self._data['storages'])} storages>"

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Writes the report, by the name's end as JSON, HTML or text.

        Raises:
            ValueError: the name ends in something other than .json, .html or .txt.
        """
        name = os.fspath(path)
        end = os.path.splitext(name)[1]
        makers: dict[str, Callable[[], str]] = {".json": self.to_json, ".html": self.to_html, ".txt": self.text}
        if end not in makers:
            raise ValueError(f"save: {name!r} must end in .json, .html or .txt")
        # The program's arguments may be no text.
        with open(name, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(makers[end]() + "\n")


class Holders(list[Path]):
    """The ways from roots to one storage, shortest first: a list of `Path`."""

    def __init__(self, paths: Iterable[Path], storage: dict[str, Any]) -> None:
        super().__init__(paths)
        self.storage = storage
        """The storage as `Report.to_dict` describes it."""

    def __str__(self) -> str:
        return _text.storage_text(self.storage)


class Difference:
    """What grew from one report to another, by holder."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        """Dicts of ``holder`` (words), ``device``, ``bytes`` and ``storages``: what was added, or
        less than zero; the largest growth first."""

    def __str__(self) -> str:
        return _text.difference_text(self.rows)


# The search


class _Search:
    """One look at everything. What it holds goes when it is left.
    """

    def __init__(self, seconds: float, *, is_failure: bool = False) -> None:
        self.start = time.perf_counter()
        self.seconds = seconds
        self.is_failure = is_failure
        self.notes: list[str] = []
        self.is_late = False
        self.heap = Heap(
            [torch.Tensor, torch.storage.UntypedStorage], OWN_FILES, seconds, MAX_EDGES
        )
        self.storages = Storages()
        self.graph = Graph(max(0.1, seconds - self.elapsed()))
        if not self.heap.knows_frozen:
            self.notes.append("objects that gc.freeze() has hidden were seen only where others refer to them")

    def __enter__(self) -> "_Search":
        return self

    def __exit__(self, *error: object) -> None:
        self.heap.close()

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def truncated(self) -> bool:
        return bool(self.heap.truncated or self.graph.truncated or self.is_late)

    def gather(self) -> None:
        tensors = []
        for tensor in self.heap.instances(0):
            try:
                self.storages.see(tensor, is_referred_to=self.heap.found_references(tensor) > 0)
                tensors.append(tensor)
            except Exception as error:  # One tensor that will not tell must not hide the others.
                note = f"tensors of the type `{plain(type_name(tensor))}` do not tell their storage ({short_name(error)})"
                if note not in self.notes:
                    self.notes.append(note)
        for storage in self.heap.instances(1):
            self.storages.see_storage(storage)
        for tensor in tensors:
            self._gradient(tensor)
            self.graph.add(tensor, self.storages)
        for capsule, address in self.heap.capsules():
            held = self.storages.at(address)
            if held is not None:
                held.capsules.append(capsule)

    def _gradient(self, tensor: Any) -> None:
        get = _memory._get
        try:
            if not (get["is_leaf"](tensor) or get["retains_grad"](tensor)):
                return
            gradient = get["grad"](tensor)
        except RuntimeError:
            return
        if gradient is None:
            return
        held = self.storages.of(gradient)
        if held is not None:
            held.grads.append(tensor)
            if not held.dtype:
                held.see(gradient, has_object=False)

    def paths(self, held: Held, limit: int) -> tuple[list[Path], dict[str, Any] | None]:
        """The ways to a storage, and the cycle that holds it if there are none."""
        found: list[tuple[int, Path]] = []
        for root, name, thread, objects in self.heap.paths(held.objects, limit):
            found.append((len(objects), describe(root, name, thread, objects)))
        for leaf in held.grads:
            for length, steps in self._ways(leaf):
                steps.append({"text": "its gradient, `.grad`", "kind": "gradient", "type": "torch.Tensor"})
                found.append((length + 1, finish(steps)))
        for capsule in held.capsules:
            for length, steps in self._ways(capsule):
                steps.append({"text": "a DLPack capsule that nobody has taken", "kind": "dlpack", "type": "PyCapsule"})
                found.append((length + 1, finish(steps)))
        found.extend(self._autograd(held, found))
        unique: dict[str, tuple[int, Path]] = {}
        for length, path in sorted(found, key=_order):
            unique.setdefault(path.words, (length, path))
        paths = [path for _, path in unique.values()][:limit]
        if paths or not held.objects:
            return paths, None
        return paths, self._cycle(held.objects)

    def _is_over(self) -> bool:
        return self.truncated or self.elapsed() > self.seconds

    def _why_no_way(self, held: Held) -> tuple[str, str]:
        """The kind of a storage that nothing seems to hold, and words for it."""
        if self.is_late:
            return "late", "not looked at in time"
        # What an expression has computed and gives to a call is in no variable, at most in the tuple of the
        # arguments. C++ can hold a tensor likewise.
        is_counted = self.is_failure and any(
            way[0] is way[-1] or (len(way) == 2 and type(way[0]) is tuple)
            for _, way in self.heap.native(held.objects, 8)
        )
        if is_counted:
            return "in progress", (
                "in no variable: probably a value in progress, an argument of a call that runs; else a native owner"
            )
        return "native", "a native owner that Python does not show"

    def _ways(self, target: Any) -> list[tuple[int, list[dict[str, Any]]]]:
        """The shortest way to an object, as steps; for one in a dead cycle, a step that says so."""
        ways = [
            (len(objects), describe(root, name, thread, objects))
            for root, name, thread, objects in self.heap.paths([target], 4)
        ]
        if ways:
            length, path = min(ways, key=_order)
            return [(length, [dict(step) for step in path.steps])]
        cycle = self._cycle([target])
        if cycle is None:
            return []
        return [(1000, [{"text": f"the cycle {cycle['words']}", "kind": "object", "type": ""}])]

    def _autograd(self, held: Held, found: list[Any]) -> list[tuple[int, Path]]:
        keepers = self.graph.keepers(held)
        if not keepers and not found and held.objects:
            # Attributes of a custom function's context: Python's, but held by a node.
            for _, way in self.heap.native(held.objects, 64):
                if id(way[0]) in self.graph.nodes:
                    keepers = self.graph.results_of([id(way[0])])
                    break
        paths = []
        for result, node, size in keepers:
            if any(result is own for own in held.objects) and found:
                continue
            node_name = type(node).__name__
            for length, steps in self._ways(result):
                plural = "s" if size != 1 else ""
                name = _tick(steps)
                steps.append({
                    "text": f"the autograd graph of {name} ({size} node{plural}), saved by {node_name}",
                    "kind": "autograd",
                    "type": node_name,
                    "nodes": size,
                })  # fmt: skip
                paths.append((length + 1, finish(steps)))
        return paths

    def _cycle(self, objects: list[Any]) -> dict[str, Any] | None:
        found = self.heap.cycle(objects)
        if found is None:
            return None
        cycle, way = found
        natives = self.heap.native([cycle[0]], 4)
        return describe_cycle(self.heap, cycle, way, natives).to_dict()

    def storage(self, held: Held, limit: int) -> dict[str, Any]:
        """A storage as the report has it."""
        if not held.dtype:
            for tensor in held.objects:
                if isinstance_plain(tensor, torch.Tensor):
                    held.see(tensor, has_object=False)
        paths, cycle = self.paths(held, limit)
        view = None
        if held.used < held.bytes // 2:
            share = 100 * held.used / held.bytes
            view = f"view of {_text.size(held.bytes)} storage using {share:.1f} %"
        if self._is_over() and not paths:
            # The search may have stopped on the way, and so may that for a cycle.
            self.is_late = True
            cycle = None
        if not paths and cycle is None:
            kind, text = self._why_no_way(held)
            step = {"text": text, "kind": kind, "type": ""}
            paths = [Path(text, kind, (step,), CURES[kind])]
        if view is not None and not (cycle or {}).get("collectable"):
            cure = CURES["view"]
        elif cycle is not None:
            cure = "call gc.collect()" if cycle["collectable"] else "call gc.unfreeze(), then gc.collect()"
            if not cycle["collectable"] and "gc.unfreeze" not in cycle["words"]:
                cure = CURES["native"]
        else:
            cure = paths[0].cure
        return {
            "bytes": held.bytes,
            "used_bytes": held.used,
            "device": held.device,
            "dtype": held.dtype,
            "shape": list(held.shape),
            "requires_grad": bool(held.requires_grad),
            "is_parameter": held.is_parameter,
            "tensors": held.num_tensors,
            "view": view,
            "paths": [path.to_dict() for path in paths],
            "cycle": cycle,
            "cure": cure,
        }


def _order(pair: tuple[int, Path]) -> tuple[int, int]:
    """What a person has fewer words to read for comes first, then what has fewer objects."""
    length, path = pair
    return len(path.steps), length


def _tick(steps: list[dict[str, Any]]) -> str:
    """The name in ticks that a path ends with."""
    found = re.findall(r"`[^`]*`", steps[-1]["text"]) if steps else []
    return found[0] if found else "a result"


class _Quiet:
    """Python's collector does not run meanwhile, and no tensor subclass and no mode is asked."""

    def __enter__(self) -> None:
        self.was_enabled = gc.isenabled()
        gc.disable()
        self.guards = contextlib.ExitStack()
        self.guards.enter_context(torch._C.DisableTorchFunction())
        self.guards.enter_context(torch._C._DisableTorchDispatch())

    def __exit__(self, *error: object) -> None:
        self.guards.close()
        if self.was_enabled:
            gc.enable()


def _index(device: Any) -> int | None:
    """A device's number; None for all."""
    if device is None:
        return None
    if type(device) is int:
        return int(device)
    index: int | None = torch.device(device).index
    return int(torch.cuda.current_device()) if index is None else index


def _rank() -> int | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def report(top: int = 20, device: Any = None, *, seconds: float = 2.0) -> Report:
    """Who holds the memory: the ``top`` heaviest storages, on one device or on all and the CPU.

    It stops looking after about ``seconds``, and says so. It works while the device is full.

    >>> import torch
    >>> from lastref.torch import report
    >>> kept = {"weights": torch.zeros(1 << 20)}
    >>> report(top=1).to_dict()["storages"][0]["bytes"] >= 4 << 20
    True
    """
    return _report(top, device, seconds, None)


def for_out_of_memory(
    device: int | None, requested: int, rungs: Iterable[Any] = (), message: str = "", *, top: int = 150,
    seconds: float = 2.0,
) -> Report:  # fmt: skip
    """The report of a failed allocation: what was asked for, and what was tried before it failed.

    A rung is a tuple, or a dict, of ``name``, ``bytes`` and ``microseconds``.
    """
    keys = ("name", "bytes", "microseconds")
    rows = [dict(rung) if isinstance(rung, dict) else dict(zip(keys, rung, strict=True)) for rung in rungs]
    failure = {"device": device, "requested": requested, "message": message, "rungs": rows}
    return _report(top, device, seconds, failure)


def _report(top: int, device: Any, seconds: float, failure: dict[str, Any] | None) -> Report:
    with _Quiet():
        segments = _memory.snapshot() if _memory.used_devices() else []
        with _Search(seconds, is_failure=failure is not None) as search:
            if segments is None:
                search.notes.append("the allocator in use does not tell its segments: what it holds counts as context")
            return Report(_collect(search, top, device, seconds, segments or [], failure))


def _collect(
    search: _Search, top: int, device: Any, seconds: float, segments: list[dict[str, Any]],
    failure: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    search.gather()
    index = _index(device)
    chosen = list(search.storages.by_key.values())
    if index is not None:
        chosen = [held for held in chosen if held.device == f"cuda:{index}"]
    chosen.sort(key=lambda held: (-held.bytes, held.address))
    totals: dict[str, dict[str, int]] = {}
    for held in chosen:
        total = totals.setdefault(held.device, {"bytes": 0, "storages": 0})
        total["bytes"] += held.bytes
        total["storages"] += 1
    shown = []
    for held in chosen[: max(0, top)]:
        search.is_late = search.is_late or search.elapsed() > seconds
        shown.append(search.storage(held, 1 if search.is_late else MAX_PATHS))
    addresses = {held.address for held in search.storages.by_key.values()}
    unknown_bytes, unknown_blocks = _memory.unknown_blocks(segments, addresses, index)
    devices = [number for number in _memory.used_devices() if index is None or number == index]
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": _rank(),
        "program": " ".join(sys.argv) if hasattr(sys, "argv") else "",
        "torch": str(torch.__version__),
        "lastref": _version,
        "devices": [_memory.device_memory(number, segments) for number in devices],
        "out_of_memory": failure,
        "storages": shown,
        "totals": totals,
        "native_unknown": {"bytes": unknown_bytes, "blocks": unknown_blocks},
        "autograd": _graphs(shown),
        "notes": search.notes,
        "truncated": search.truncated,
        "objects": search.heap.num_objects,
        "seconds": round(search.elapsed(), 4),
    }


def _graphs(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The autograd graphs that keep the storages shown, the heaviest first."""
    graphs: dict[str, dict[str, Any]] = {}
    for storage in shown:
        kept_by = set()
        for path in storage["paths"]:
            step = path["steps"][-1]
            if step["kind"] != "autograd" or "nodes" not in step:
                continue
            result = " → ".join(step["text"] for step in path["steps"][:-1])
            if result not in kept_by:
                kept_by.add(result)
                row = graphs.setdefault(result, {"result": result, "nodes": step["nodes"], "bytes": 0})
                row["bytes"] += storage["bytes"]
    return sorted(graphs.values(), key=lambda row: -row["bytes"])


def holders(tensor_or_storage: Any, *, limit: int = MAX_PATHS, seconds: float = 2.0) -> Holders:
    """Who holds this tensor's storage, shortest way first: at most ``limit`` ways.

    >>> import torch
    >>> from lastref.torch import holders
    >>> kept = {"weights": torch.zeros(3)}
    >>> print(holders(kept["weights"])[0])  # doctest: +ELLIPSIS
    global `kept['weights']`...

    Raises:
        TypeError: the argument is neither a tensor nor a storage.
        ValueError: it has no memory of its own.
    """
    import_typed = torch.storage.TypedStorage
    with _Quiet():
        if isinstance(tensor_or_storage, import_typed):
            tensor_or_storage = tensor_or_storage._untyped_storage
        is_storage = isinstance(tensor_or_storage, torch.storage.UntypedStorage)
        if not is_storage and not isinstance(tensor_or_storage, torch.Tensor):
            raise TypeError(
                f"holders: expected a tensor or a storage, got {type(tensor_or_storage).__name__}"
            )
        with _Search(seconds) as search:
            search.gather()
            if is_storage:
                held = search.storages.by_key.get(tensor_or_storage._cdata)
            else:
                held = search.storages.of(tensor_or_storage)
            if held is None:
                raise ValueError("holders: the tensor has no memory of its own")
            storage = search.storage(held, limit)
    paths = [
        Path(path["words"], path["kind"], tuple(path["steps"]), path["cure"])
        for path in storage["paths"]
    ]
    return Holders(paths, storage)


# Growth


def _holder_of(storage: dict[str, Any]) -> str:
    """Words that are the same for storages with the same holder: without numbers of items and lines."""
    if storage["paths"]:
        words = storage["paths"][0]["words"]
    else:
        words = storage["cycle"]["words"]
    # A running function goes from line to line.
    return re.sub(r"\(([^():]+):\d+", r"(\1", re.sub(r"\[\d+\]", "[…]", words))


def diff(a: Report, b: Report) -> Difference:
    """What grew from report ``a`` to report ``b``, by holder.

    Storages count together if they are held in the same way but for the number of an item. Both
    reports should have been made with a ``top`` that shows all that matters.

    >>> import torch
    >>> from lastref.torch import diff, report
    >>> before = report()
    >>> history = [torch.zeros(1 << 20) for _ in range(3)]
    >>> "history" in str(diff(before, report()))
    True
    """
    sums: dict[tuple[str, str], list[int]] = {}
    for sign, made in ((-1, a), (1, b)):
        for storage in made._data["storages"]:
            row = sums.setdefault((_holder_of(storage), storage["device"]), [0, 0])
            row[0] += sign * storage["bytes"]
            row[1] += sign
    rows = [
        {"holder": holder, "device": device, "bytes": num_bytes, "storages": count}
        for (holder, device), (num_bytes, count) in sums.items()
        if num_bytes or count
    ]
    rows.sort(key=lambda row: (-row["bytes"], row["holder"]))  # type: ignore[operator]
    return Difference(rows)


def watch(
    steps: Iterable[_Item], *, every: int = 1, top: int = 100, device: Any = None, file: TextIO | None = None
) -> Iterator[_Item]:  # fmt: skip
    """Goes through ``steps`` and prints, after each ``every``, what grew since the look before.

    The first step is left out, since it makes what stays: state, buffers, the cache.

    >>> import torch
    >>> from lastref.torch import watch
    >>> history = []
    >>> for step in watch(range(3)):
    ...     history.append(torch.zeros(1 << 20))
    after step 2: +4.0 MiB on cpu, in 1 storage
      global `history[…]`
    after step 3: +4.0 MiB on cpu, in 1 storage
      global `history[…]`
    """
    source = iter(steps)
    before: Report | None = None
    count = 0
    while True:
        try:
            yield next(source)  # In no variable: it would be held.
        except StopIteration:
            return
        count += 1
        if count % every:
            continue
        now = report(top, device)
        if before is not None:
            for line in _text.growth_lines(count, diff(before, now).rows):
                print(line, file=file)
        before = now
