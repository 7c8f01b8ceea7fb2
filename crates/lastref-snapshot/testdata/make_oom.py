"""Writes oom/CASE.pickle.gz with the real PyTorch, on the stand-in for a device of 1 GiB: allocations that fail, each
for a reason of its own. ``python make_oom.py`` in an environment with torch."""

import gzip
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
STANDIN = HERE.parents[2] / "python/tests/torch/standin"
BEGIN = """
import gc, sys, torch
MIB = 1 << 20
gc.disable()

def full(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

full(1)
torch.cuda.empty_cache()
torch.cuda.memory._record_memory_history(context="all", stacks="python")
torch._C._cuda_attach_out_of_memory_observer(
    lambda device, alloc, limit, free: torch.cuda.memory._dump_snapshot(sys.argv[1])
)
"""
RUN = "exec(compile(open('train.py').read(), 'train.py', 'exec'))"
CASES = {
    "dead-cycles": """
class Node:
    def __init__(self):
        self.buffer = full(64)
        self.me = self

def train():
    for step in range(40):
        Node()

train()
""",
    "fragmentation": """
def load_weights():
    return [full(100) for _ in range(4)]

def warm_up():
    full(560)

def activations():
    return [full(16) for _ in range(35)]

weights = load_weights()
warm_up()
kept = activations()[::2]
scores = full(120)
""",
    "memory-fraction": """
torch.cuda.set_per_process_memory_fraction(0.5)

def load_weights():
    return [full(100) for _ in range(4)]

weights = load_weights()
logits = full(200)
""",
    "private-pool": """
pool = torch.cuda.MemPool()

def capture():
    with torch.cuda.use_mem_pool(pool):
        full(600)

capture()
weights = [full(100) for _ in range(2)]
batch = full(400)
""",
    "other-stream": """
side = torch.cuda.Stream()

def prefetch():
    with torch.cuda.stream(side):
        full(600)
        return full(20)

kept = prefetch()
weights = [full(100) for _ in range(2)]
batch = full(400)
""",
    "too-large": """
def load_weights():
    return [full(100) for _ in range(2)]

def attention():
    return full(1800)

weights = load_weights()
attention()
""",
}


def main():
    sys.path.insert(0, str(STANDIN))
    import build

    folder = HERE / "oom"
    folder.mkdir(exist_ok=True)
    standin = build.build(pathlib.Path(sys.argv[1]))
    for name, program in CASES.items():
        (standin / "train.py").write_text(BEGIN + program)
        snapshot = standin / f"{name}.pickle"
        done = subprocess.run(
            # Compiled by hand, so that frames say train.py and not where it lies.
            [sys.executable, "-c", RUN, str(snapshot)],
            env=build.environment(standin, 1024),
            cwd=standin,
            capture_output=True,
            text=True,
        )
        assert "OutOfMemoryError" in done.stderr, f"{name}: {done.stderr}"
        print(name, done.stderr.strip().splitlines()[-1])
        with gzip.GzipFile(folder / f"{name}.pickle.gz", "wb", mtime=0) as file:
            file.write(snapshot.read_bytes())


main()
