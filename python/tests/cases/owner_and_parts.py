"""A run knows its model and the model knows its run, and a table of state hangs on both."""

import gc

import adapter

gc.disable()


class Model:
    run: "Run"

    def __init__(self) -> None:
        self.weights = adapter.alloc(64)


class Run:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.state = {name: adapter.alloc(64) for name in ("momentum", "variance")}
        self.batches = iter([adapter.alloc(4)])
        model.run = self


model = Model()
run = Run(model)
del model
assert adapter.live_mib() == 196
del run
assert adapter.live_mib() == 196, "each keeps the other"
gc.collect()
assert adapter.live_mib() == 0
