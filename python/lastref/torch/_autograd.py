"""What the autograd graph keeps: C++ edges that Python's collector cannot see.

A result with a ``grad_fn`` keeps the graph it was computed by; each node of that keeps the tensors its
backward pass needs. The graph is walked from the live tensors over ``next_functions``. Saved tensors
are read as they lie there: hooks that would unpack them are not called.
"""

import time
from typing import Any

import torch

from ._memory import Held, Storages, _get

MAX_NODES = 500_000


class Graph:
    """The nodes that live tensors keep, and what these keep."""

    def __init__(self, seconds: float) -> None:
        self.until = time.perf_counter() + seconds
        self.truncated = False
        # Wrappers of nodes are made when asked for: they are kept, so that their identity stays.
        self.nodes: dict[int, Any] = {}
        self.next: dict[int, list[int]] = {}
        self.consumers: dict[int, list[int]] = {}
        self.results: dict[int, list[Any]] = {}
        self.savers: dict[int, list[int]] = {}
        self._names: dict[type, list[str]] = {}
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Any, storages: Storages) -> None:
        """Notes the graph of a live tensor."""
        function = _get["grad_fn"](tensor)
        if function is None:
            return
        self.results.setdefault(id(function), []).append(tensor)
        work = [function]
        while work:
            node = work.pop()
            if id(node) in self.nodes:
                continue
            if len(self.nodes) >= MAX_NODES or (len(self.nodes) % 256 == 0 and time.perf_counter() > self.until):
                self.truncated = True
                return
            self.nodes[id(node)] = node
            following = []
            for successor, _ in node.next_functions:
                if successor is not None:
                    # The wrapper must live before its identity is taken.
                    work.append(successor)
                    following.append(successor)
            self.next[id(node)] = [id(successor) for successor in following]
            for successor in following:
                self.consumers.setdefault(id(successor), []).append(id(node))
            for saved in self._saved(node):
                held = storages.of(saved)
                if held is not None:
                    if not held.dtype:
                        held.see(saved, has_object=False)
                    savers = self.savers.setdefault(id(held), [])
                    if not savers or savers[-1] != id(node):
                        savers.append(id(node))

    def _saved(self, node: Any) -> list[Any]:
        """The tensors that a node keeps."""
        kind = type(node)
        names = self._names.get(kind)
        if names is None:
            names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
            if "variable" in dir(kind) and kind.__name__ == "AccumulateGrad":
                names = ["variable"]
            self._names[kind] = names
        found = []
        for name in names:
            try:
                value = getattr(node, name)
            except (RuntimeError, AttributeError):
                continue  # freed by a backward pass
            for saved in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(saved, torch.Tensor):
                    found.append(saved)
                    continue
                try:
                    data = saved.data
                except (RuntimeError, AttributeError):
                    continue  # kept elsewhere by a hook
                if isinstance(data, torch.Tensor):
                    found.append(data)
        return found

    def keepers(self, held: Held, limit: int = 8) -> list[tuple[Any, Any, int]]:
        """The live results whose graphs keep this storage, nearest first.

        Each with the node that keeps it, and the number of nodes in the result's graph.
        """
        return self.results_of(self.savers.get(id(held), []), limit)

    def results_of(self, nodes: list[int], limit: int = 8) -> list[tuple[Any, Any, int]]:
        found: list[tuple[Any, Any, int]] = []
        saver_of = {node: node for node in nodes}
        work = list(nodes)
        at = 0
        while at < len(work) and len(found) < limit:
            node = work[at]
            at += 1
            for result in self.results.get(node, ()):
                if len(found) < limit and not any(result is known for known, _, _ in found):
                    found.append((result, self.nodes[saver_of[node]], self.size(node)))
            for consumer in self.consumers.get(node, ()):
                if consumer not in saver_of:
                    saver_of[consumer] = saver_of[node]
                    work.append(consumer)
        return found

    def size(self, node: int) -> int:
        """How many nodes can be reached from this one, itself among them."""
        if node in self._sizes:
            return self._sizes[node]
        seen = {node}
        work = [node]
        while work:
            for successor in self.next.get(work.pop(), ()):
                if successor not in seen:
                    seen.add(successor)
                    work.append(successor)
        self._sizes[node] = len(seen)
        return len(seen)
