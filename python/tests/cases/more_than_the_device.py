"""Ten times what fits, in objects that are dead at once, with and without the collector."""

import adapter
import lastref

NUM_FIT = 8
adapter.set_cap(NUM_FIT * 100)


class Garbage:
    def __init__(self) -> None:
        self.me = self
        self.tensor = adapter.alloc(100)


lastref.gc.disable()
lastref.gc.set_before_out_of_memory(False)
made = 0
try:
    for made in range(NUM_FIT * 10):
        Garbage()
except adapter.OOM:
    pass
assert made == NUM_FIT

lastref.gc.set_before_out_of_memory(True)
before = adapter.collections
for _ in range(NUM_FIT * 10):
    Garbage()
assert adapter.collections > before
