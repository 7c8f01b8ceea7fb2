"""Disabled, the collector still runs before an error; what is frozen or saved it cannot free."""

import gc

import adapter
import lastref

gc.disable()
adapter.set_cap(100)


class Node:
    def __init__(self) -> None:
        self.me = self
        self.tensor = adapter.alloc(50)


for _ in range(10):
    Node()

gc.collect()
Node()
Node()
gc.freeze()
try:
    Node()
except adapter.OOM as error:
    assert "frozen" in str(error), error
    assert error.gc_frozen_count > 0
else:
    raise AssertionError("frozen garbage was freed")
assert adapter.live_mib() == 100
gc.unfreeze()
Node()
gc.collect()
assert adapter.live_mib() == 0

gc.set_debug(gc.DEBUG_SAVEALL)
Node()
Node()
try:
    Node()
except adapter.OOM as error:
    assert "DEBUG_SAVEALL" in str(error), error
else:
    raise AssertionError("saved garbage was freed")
assert adapter.live_mib() == 100
gc.set_debug(0)
gc.garbage.clear()
lastref.gc.collect()
assert adapter.live_mib() == 0
