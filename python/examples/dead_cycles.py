"""Objects that each refer to themselves and hold 400 MiB of device memory, 400 of them in a row.

Nobody can reach one after the next is made, and counting references does not free it. Run it on a
simulated GPU with ``LASTREF_SIM=11000MiB python dead_cycles.py``: 27 of them fill the device, and the
collector frees them before the 28th fails, or earlier.
"""

import lastref

NUM_OBJECTS = 400
BYTES_EACH = 400 << 20


class Garbage:
    def __init__(self) -> None:
        self.cycle = self
        self.tensor = lastref.empty(BYTES_EACH, dtype=lastref.uint8, device="cuda")


for _ in range(NUM_OBJECTS):
    Garbage()

runs = [stats for stats in lastref.gc.stats().values() if stats.runs]
print(f"{NUM_OBJECTS} objects of {BYTES_EACH >> 20} MiB")
print(f"collections: {sum(stats.runs for stats in runs)}")
print(f"milliseconds in them: {sum(stats.microseconds for stats in runs) / 1000:.1f}")
print(f"peak: {lastref.cuda.max_memory_allocated() >> 20} MiB")
lastref.gc.collect()
lastref.cuda.empty_cache()
print(f"left after collect and empty_cache: {lastref.cuda.memory_reserved()} bytes")
