"""A local function that calls itself is a cycle, and keeps what it closes over."""

import gc

import adapter

gc.disable()
adapter.set_cap(100)


def walk(depth: int) -> int:
    weights = {"w": adapter.alloc(24)}

    def visit(depth: int) -> int:
        return len(weights) + (visit(depth - 1) if depth else 0)

    return visit(depth)


assert [walk(depth) for depth in range(4)] == [1, 2, 3, 4]
assert adapter.live_mib() == 96, "four that nobody can call"
assert sum(walk(0) for _ in range(40)) == 40
assert adapter.live_mib() <= 100
gc.collect()
assert adapter.live_mib() == 0
