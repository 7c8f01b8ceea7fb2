"""Programs that each have the essence of something people report, and the answer they are to get.

Those here are this project's own. Others are run where the folder they come from is beside the checkout.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]
HERE = Path(__file__).parent
OTHERS = HERE.parents[3] / "shared" / "cases" / "py"

Storages = list[dict[str, Any]]
Check = Callable[[list[Storages]], None]


def ways(storage: dict[str, Any]) -> list[str]:
    return [path["words"] for path in storage["paths"]]


def one(storages: Storages, mib: int) -> dict[str, Any]:
    found = [storage for storage in storages if storage["bytes"] == mib << 20]
    assert found, f"no storage of {mib} MiB among {[storage['bytes'] for storage in storages]}"
    return found[0]


def failed_step(looks: list[Storages]) -> None:
    held = one(looks[0], 60)
    assert any(
        words.startswith("global `e` (`") and "→ its traceback → variable `act` in `step`" in words for words in ways(held)
    ), ways(held)
    assert {path["kind"] for path in held["paths"]} == {"exception"}
    assert not looks[1]


def last_error(looks: list[Storages]) -> None:
    for look in looks[:2]:
        held = one(look, 48)
        assert any(words.startswith("`sys.last_") and "variable `w` in `f`" in words for words in ways(held)), ways(held)
        assert held["paths"][0]["kind"] == "last traceback"
        assert "sys.last_" in held["cure"]
    assert not looks[2]


def sum_of_losses(looks: list[Storages]) -> None:
    held = [storage for storage in looks[0] if storage["bytes"] == 8 << 20]
    assert len(held) == 12
    for storage in held:
        assert ways(storage)[0].startswith("global `total` → the autograd graph of `total` ("), ways(storage)
        assert "detach()" in storage["cure"]
        assert "item()" in storage["cure"]
    assert not looks[1]


def small_view(looks: list[Storages]) -> None:
    held = one(looks[0], 256)
    assert held["view"] == "view of 256 MiB storage using 0.0 %"
    assert "clone()" in held["cure"]
    assert ways(held) == ["global `x`"]


def hook_cycle(looks: list[Storages]) -> None:
    assert len(looks[0]) == 3
    for storage in looks[0]:
        assert storage["paths"] == []
        words = storage["cycle"]["words"]
        assert "its hook `_forward_hooks[0]`" in words, words
        assert "closure cell `s` of function" in words, words
        assert storage["cycle"]["collectable"]
    assert not looks[1]


def owner_and_parts(looks: list[Storages]) -> None:
    assert sum(storage["bytes"] for storage in looks[0]) == 155 << 20
    found = [words for storage in looks[0] for words in ways(storage)]
    for expected in ("trainer.model.p", "trainer.opt.groups[0]", "trainer.loops['fit']['batch']"):
        assert any(expected in words for words in found), found
    assert any("trainer.opt.state[" in words for words in found), found
    for storage in looks[0]:
        assert ways(storage) == sorted(ways(storage), key=lambda words: words.count("→"))
    for storage in looks[1]:
        assert "trainer" in storage["cycle"]["words"]
        assert storage["cycle"]["collectable"]
    assert not looks[2]


def more_than_the_device(looks: list[Storages]) -> None:
    pass  # That it finishes is checked by the program.


def calls_itself(looks: list[Storages]) -> None:
    assert len(looks[0]) == 3
    for storage in looks[0]:
        assert "closure cell `load` of function `" in storage["cycle"]["words"]
        assert storage["cycle"]["collectable"]
    assert not looks[1]


def hidden(looks: list[Storages]) -> None:
    frozen = one(looks[1], 10)
    assert frozen["cycle"]["words"].endswith("frozen by gc.freeze(), so gc cannot free it until gc.unfreeze()")
    assert not frozen["cycle"]["collectable"]
    assert "gc.unfreeze()" in frozen["cure"]
    kept = one(looks[3], 10)
    assert ways(kept)[0].startswith("`gc.garbage")
    assert not looks[2]
    assert not looks[4]


#: The others, by what their names begin with.
ANSWERS: dict[str, Check] = {
    "r01": failed_step,
    "r03": last_error,
    "r08": sum_of_losses,
    "r10": small_view,
    "r12": hook_cycle,
    "r16": owner_and_parts,
    "r27": more_than_the_device,
    "r28": calls_itself,
    "r29": hidden,
}

#: Our own: a program that looks at what is live at the same places, and the answer.
PROGRAMS: dict[str, tuple[str, Check]] = {
    "failed_step": (
        """
lab.set_cap(100)
def step(mib):
    act = lab.alloc(60)
    return lab.alloc(mib)
try:
    step(60)
except lab.OOM as e:
    assert lab.live_mib() == 60
assert lab.live_mib() == 0
assert step(30) is not None
""",
        failed_step,
    ),
    "last_error": (
        """
import code, sys
shell = code.InteractiveInterpreter({"lab": lab})
shell.write = lambda text: None
shell.runsource("def f():\\n    w = lab.alloc(48)\\n    1 / 0\\n", symbol="exec")
for _ in range(2):
    shell.runsource("f()", symbol="exec")
    assert lab.live_mib() == 48
for name in [name for name in vars(sys) if name.startswith("last_")]:
    delattr(sys, name)
gc.collect()
assert lab.live_mib() == 0
""",
        last_error,
    ),
    "sum_of_losses": (
        """
total = 0
for _ in range(6):
    inputs, weights = lab.alloc(8), lab.alloc(8, True)
    total = total + (weights * inputs).sum()
    del inputs, weights
assert lab.live_mib() == 96
total = total.detach()
assert lab.live_mib() == 0
""",
        sum_of_losses,
    ),
    "small_view": (
        """
x = lab.alloc(256)
x = x[:1]
assert lab.live_mib() == 256
x = x.clone()
assert lab.live_mib() == 0
""",
        small_view,
    ),
    "hook_cycle": (
        """
class Model:
    def __init__(s):
        s.weight = lab.alloc(30)
        def hook(*_): return s.weight
        s._forward_hooks = {0: hook}
for _ in range(3):
    Model()
assert lab.live_mib() == 90
gc.collect()
assert lab.live_mib() == 0
""",
        hook_cycle,
    ),
    "owner_and_parts": (
        """
class Model: pass
class Run: pass
class Opt: pass
model, trainer, opt = Model(), Run(), Opt()
model.p = lab.alloc(50)
opt.groups, opt.state = [model.p], {7: (lab.alloc(50), lab.alloc(50))}
trainer.model, model.trainer, trainer.opt, trainer.loops = model, trainer, opt, {"fit": {"batch": lab.alloc(5)}}
del model, opt
assert lab.live_mib() == 155
del trainer
assert lab.live_mib() == 155
gc.collect()
assert lab.live_mib() == 0
""",
        owner_and_parts,
    ),
    "more_than_the_device": (
        """
class Node:
    def __init__(self, tensor): self.me, self.tensor = self, tensor
lab.set_cap(1000)
for _ in range(100):
    Node(lab.alloc(100))
""",
        more_than_the_device,
    ),
    "calls_itself": (
        """
def walk(depth):
    state = {"w": lab.alloc(33)}
    def load(n):
        return load(n - 1) if n else len(state)
    return load(depth)
for _ in range(3):
    walk(2)
assert lab.live_mib() == 99
gc.collect()
assert lab.live_mib() == 0
""",
        calls_itself,
    ),
    "hidden": (
        """
class Node: pass
def cycle():
    node = Node()
    node.me, node.tensor = node, lab.alloc(10)
cycle(); gc.collect()
assert lab.live_mib() == 0
cycle(); gc.freeze(); gc.collect()
assert lab.live_mib() == 10
gc.unfreeze(); gc.collect()
assert lab.live_mib() == 0
gc.set_debug(gc.DEBUG_SAVEALL); cycle(); gc.collect()
assert lab.live_mib() == 10
gc.set_debug(0); gc.garbage.clear(); gc.collect()
assert lab.live_mib() == 0
""",
        hidden,
    ),
}


def looks(path: Path) -> list[Storages]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_own(name: str, device: str, run_torch: RunTorch, tmp_path: Path) -> None:
    source, check = PROGRAMS[name]
    program = tmp_path / "program.py"
    program.write_text("import gc\nimport torchlab as lab\ngc.disable()\n" + source)
    start = f"import runpy, sys; sys.path.insert(0, {str(HERE)!r}); runpy.run_path({str(program)!r}, run_name='__main__')"
    reports = tmp_path / "reports"
    run_torch("-c", start, mib=2000, env={"LAB_DEVICE": device, "LAB_REPORTS": str(reports)})
    check(looks(reports))


@pytest.mark.skipif(not OTHERS.is_dir(), reason="no other programs are beside the checkout")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ANSWERS)
def test_others(name: str, device: str, run_torch: RunTorch, tmp_path: Path) -> None:
    (program,) = OTHERS.glob(f"{name}_*.py")
    start = f"import runpy, sys; sys.path[:0] = [{str(HERE)!r}, {str(OTHERS)!r}]; runpy.run_path({str(program)!r}, run_name='__main__')"
    reports = tmp_path / "reports"
    env = {"LAB_BACKEND": "torchlab", "LAB_DEVICE": device, "LAB_REPORTS": str(reports)}
    done = run_torch("-c", start, mib=2000, env=env)
    if name != "r27":
        assert '"ok": true' in done.stdout
    ANSWERS[name](looks(reports))
