"""An object registers a callback that closes over it: dead, it stays until the collector runs."""

import gc

import adapter

gc.disable()
adapter.set_cap(200)


class Player:
    def __init__(self) -> None:
        self.buffer = adapter.alloc(40)
        self.on_frame = [lambda: self.buffer.nbytes]


for _ in range(2):
    Player()
assert adapter.live_mib() == 80, "two dead players"
for _ in range(50):
    player = Player()
assert player.on_frame[0]() == 40 << 20
assert adapter.collections >= 10, "the cap was reached again and again"
assert adapter.live_mib() <= 200
del player
gc.collect()
assert adapter.live_mib() == 0
