"""The error's traceback keeps the variables of the step that failed: try again after the block."""

import gc

import adapter

gc.disable()
adapter.set_cap(100)


def step(mib: int) -> int:
    kept = adapter.alloc(70)
    return kept.nbytes + adapter.alloc(mib).nbytes


fits = 80
try:
    step(fits)
except adapter.OOM:
    assert adapter.live_mib() == 70, "the frame of the step is still there"
    try:
        step(20)
    except adapter.OOM:
        fits = 20
assert fits == 20
assert adapter.live_mib() == 0
assert step(fits) == 90 << 20
