"""Who holds a tensor: each kind of holder, on real tensors, in the words that a person gets."""

import asyncio
import collections
import concurrent.futures
import contextvars
import functools
import gc
import logging
import logging.handlers
import queue
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import dlpack

from lastref.torch import holders, report

MIB = 1 << 20
#: What one test's tensor has and nothing else does: elements.
N = 777_777


def make(**options: Any) -> torch.Tensor:
    return torch.zeros(N, **options)


def find(num_bytes: int = 4 * N) -> dict[str, Any]:
    """The one storage of this size, as the report has it."""
    # On a machine with much else to do it may take long.
    data = report(top=10_000, seconds=60).to_dict()
    assert not data["truncated"]
    found = [storage for storage in data["storages"] if storage["bytes"] == num_bytes]
    assert len(found) == 1, f"{len(found)} storages of {num_bytes} bytes"
    return found[0]


def words(storage: dict[str, Any]) -> str:
    """The shortest way to a storage."""
    path = storage["paths"][0]
    return clean(f"{path['kind']}: {path['words']}")


def clean(text: str) -> str:
    """Without the numbers that change."""
    text = re.sub(re.escape(HERE) + r":\d+", HERE + ":LINE", text)
    return re.sub(r"hooks\[\d+\]", "hooks[ID]", text)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A tensor that a test left would be another's."""
    yield
    gc.collect()
    left = [tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor and tensor.numel() == N]
    assert not left


HERE = "test_holders.py"
kept: Any = None
registry: dict[str, Any] = {}
Holder = Callable[[torch.Tensor], Any]
#: What makes a holder, and the words for it. What is returned becomes the global `kept` of this module.
KINDS: dict[str, tuple[Holder, str]] = {}


def kind(expected: str) -> Callable[[Holder], Holder]:
    def add(make_holder: Holder) -> Holder:
        KINDS[make_holder.__name__] = (make_holder, expected)
        return make_holder

    return add


KEPT = f"global `kept` of module `{__name__}`"


def named(suffix: str) -> str:
    return f"global `kept{suffix}` of module `{__name__}`"


@kind(f"module global: {KEPT}")
def module_global(t: torch.Tensor) -> Any:
    return t


@kind(f"registry: {named('[1]')}")
def list_index(t: torch.Tensor) -> Any:
    return [None, t]


@kind(f"registry: {named(chr(91) + repr('a') + ']' + '[2]')}")
def dict_of_tuples(t: torch.Tensor) -> Any:
    return {"a": (1, 2, t)}


@kind(f"registry: {named('[0]')}")
def deque_item(t: torch.Tensor) -> Any:
    return collections.deque([t], maxlen=3)


@kind(f"registry: {named('{…}')}")
def set_item(t: torch.Tensor) -> Any:
    return {t}


class Plain:
    def __init__(self, value: Any) -> None:
        self.other = 1
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@kind(f"module global: {named('.value')}")
def attribute(t: torch.Tensor) -> Any:
    return Plain(t)


@kind(f"module global: {named('.value')}")
def attribute_in_a_dict(t: torch.Tensor) -> Any:
    made = Plain(t)
    assert made.__dict__
    return made


@kind(f"module global: {named('.value')}")
def slot(t: torch.Tensor) -> Any:
    return Slotted(t)


@kind(f"module global: {named('.value')}")
def simple_namespace(t: torch.Tensor) -> Any:
    return types.SimpleNamespace(value=t)


Pair = collections.namedtuple("Pair", "left right")


@kind(f"module global: {named('.right')}")
def named_tuple(t: torch.Tensor) -> Any:
    return Pair(1, t)


@kind(f"class attribute: {KEPT} → class attribute `{__name__}.class_attribute.<locals>.Cache.stored`")
def class_attribute(t: torch.Tensor) -> Any:
    class Cache:
        stored = t

    return Cache


class Net(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Linear(1, 1)])
        self.layers[1].weight = torch.nn.Parameter(weight)  # type: ignore[index]


@kind(f"module attribute: {named('.layers[1].weight')}")
def module_parameter(t: torch.Tensor) -> Any:
    return Net(t)


@kind(f"module attribute: {named('.running')}")
def module_buffer(t: torch.Tensor) -> Any:
    made = torch.nn.Module()
    made.register_buffer("running", t)
    return made


@kind(f"closure: {KEPT} → closure cell `t` of function `closure.<locals>.use` ({HERE}:LINE)")
def closure(t: torch.Tensor) -> Any:
    def use() -> torch.Tensor:
        return t

    return use


@kind(f"default argument: {KEPT} → default argument `x` of function `default.<locals>.use` ({HERE}:LINE)")
def default(t: torch.Tensor) -> Any:
    def use(a: int, x: torch.Tensor = t) -> None: ...

    return use


@kind(f"default argument: {KEPT} → default argument `x` of function `keyword_default.<locals>.use` ({HERE}:LINE)")
def keyword_default(t: torch.Tensor) -> Any:
    def use(*, x: torch.Tensor = t) -> None: ...

    return use


@kind(f"partial: {KEPT} → argument 0 of a functools.partial")
def partial(t: torch.Tensor) -> Any:
    return functools.partial(print, t)


@kind(f"partial: {KEPT} → argument `sep` of a functools.partial")
def partial_keyword(t: torch.Tensor) -> Any:
    return functools.partial(print, sep=t)


@kind(f"lru_cache: {KEPT} → the lru_cache of function `lru_key.<locals>.size`")
def lru_key(t: torch.Tensor) -> Any:
    @functools.lru_cache
    def size(x: torch.Tensor) -> int:
        return 1

    size(t)
    return size


@kind(f"lru_cache: {KEPT} → the lru_cache of function `lru_result.<locals>.load`")
def lru_result(t: torch.Tensor) -> Any:
    box = [t]
    del t

    @functools.cache
    def load(name: str) -> torch.Tensor:
        return box.pop()

    load("x")
    return load


@kind(f"module global: {named('.value')}")
def cached_property(t: torch.Tensor) -> Any:
    box = [t]
    del t

    class Lazy:
        @functools.cached_property
        def value(self) -> torch.Tensor:
            return box.pop()

    made = Lazy()
    assert made.value is not None
    return made


@kind(f"module global: {KEPT} → the object that method `Plain.__init__` is bound to → its `value`")
def bound_method(t: torch.Tensor) -> Any:
    return Plain(t).__init__  # type: ignore[misc]


@kind(f"generator: {KEPT} → local `x` of the suspended generator `rows` ({HERE}:LINE)")
def generator(t: torch.Tensor) -> Any:
    box = [t]
    del t

    def rows() -> Iterator[int]:
        x = box.pop()
        yield 1
        del x

    made = rows()
    next(made)
    return made


@kind(f"generator: {KEPT} → local `x` of the suspended coroutine `work` ({HERE}:LINE)")
def coroutine(t: torch.Tensor) -> Any:
    box = [t]
    del t

    @types.coroutine
    def pause() -> Iterator[None]:
        yield

    async def work() -> None:
        x = box.pop()
        await pause()
        del x

    made = work()
    made.send(None)
    return made


@kind(f"exception: {KEPT} (`ValueError`) → its traceback → variable `x` in `fail` ({HERE}:LINE)")
def exception(t: torch.Tensor) -> Any:
    box = [t]
    del t

    def fail() -> None:
        x = box.pop()
        raise ValueError(x.shape)

    try:
        fail()
    except ValueError as error:
        return error


@kind(
    f"exception: {KEPT} (`KeyError`) → its __context__, the `ValueError` it was raised after → its traceback → "
    f"variable `x` in `fail` ({HERE}:LINE)"
)
def exception_context(t: torch.Tensor) -> Any:
    box = [t]
    del t

    def fail() -> None:
        x = box.pop()
        raise ValueError(x.shape)

    try:
        try:
            fail()
        except ValueError:
            raise KeyError from None
    except KeyError as error:
        return error


@kind(
    f"exception: {KEPT} (`KeyError`) → its __cause__, the `ValueError` it was raised from → its attribute `tensor`"
)
def exception_cause(t: torch.Tensor) -> Any:
    cause = ValueError()
    cause.tensor = t  # type: ignore[attr-defined]
    made = KeyError()
    made.__cause__ = cause
    return made


@kind(f"exception: {KEPT} (`ExceptionGroup`) → its exception 1, a `ValueError` → its argument 0")
def exception_group(t: torch.Tensor) -> Any:
    return ExceptionGroup("several", [KeyError(), ValueError(t)])


@kind(f"queue: {KEPT} → item 1 of that queue")
def queue_item(t: torch.Tensor) -> Any:
    made: queue.Queue[Any] = queue.Queue()
    made.put(1)
    made.put(t)
    return made


@kind(f"queue: {KEPT} → an item of that `_queue.SimpleQueue`")
def simple_queue(t: torch.Tensor) -> Any:
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()
    made.put(t)
    return made


@kind(f"logging: {named('.buffer[0]')} → its `args[0]`, in a logging record")
def logging_args(t: torch.Tensor) -> Any:
    handler = logging.handlers.MemoryHandler(99)
    log = logging.Logger("x")
    log.addHandler(handler)
    log.warning("%s %s", t, 2)
    return handler


@kind(
    f"logging: {named('.buffer[0]')} → its `exc_info[2]`, in a logging record → "
    f"variable `x` in `fail` ({HERE}:LINE)"
)
def logging_error(t: torch.Tensor) -> Any:
    handler = logging.handlers.MemoryHandler(99)
    log = logging.Logger("x")
    log.addHandler(handler)
    box = [t]
    del t

    def fail() -> None:
        x = box.pop()
        raise ValueError(x.shape)

    try:
        fail()
    except ValueError:
        log.exception("failed")
    return handler


@kind(f"future: {KEPT} → its result, in a future")
def future_result(t: torch.Tensor) -> Any:
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()
    made.set_result(t)
    return made


@kind(f"exception: {KEPT} → its exception, in a future (`ValueError`) → its argument 0")
def future_exception(t: torch.Tensor) -> Any:
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()
    made.set_exception(ValueError(t))
    return made


@kind(f"future: {KEPT} → the result or callbacks of a `_asyncio.Future`")
def asyncio_future(t: torch.Tensor) -> Any:
    loop = asyncio.new_event_loop()
    made = loop.create_future()
    made.set_result(t)
    loop.close()
    return made


@kind(f"context variable: {KEPT} → context variable `the_variable`")
def context(t: torch.Tensor) -> Any:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("the_variable")
    made = contextvars.copy_context()
    made.run(variable.set, t)
    return made


class Owner:
    pass


@kind(f"finalizer: an argument of `done` ({HERE}:LINE) given to weakref.finalize")
def finalizer(t: torch.Tensor) -> Any:
    owner = Owner()
    weakref.finalize(owner, done, t)
    return owner


def done(x: object) -> None: ...


@kind(f"thread local: thread-local global `kept.x` of module `{__name__}`")
def thread_local(t: torch.Tensor) -> Any:
    made = threading.local()
    made.x = t
    return made


@kind(f"optimizer: {KEPT} → optimizer state `exp_avg` of parameter 1 of group 0")
def optimizer_state(t: torch.Tensor) -> Any:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    made = torch.optim.Adam(parameters)
    made.state[parameters[1]]["exp_avg"] = t
    return made


@kind(f"optimizer: {KEPT} → parameter 1 of the optimizer's group 0")
def optimizer_group(t: torch.Tensor) -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(t)], lr=0.1)


@kind(
    f"hook: {KEPT} → its hook `_forward_hooks[ID]` → closure cell `t` of function `forward_hook.<locals>.hook` ({HERE}:LINE)"
)
def forward_hook(t: torch.Tensor) -> Any:
    made = torch.nn.ReLU()

    def hook(*args: Any) -> None:
        t.zero_()

    made.register_forward_hook(hook)
    return made


@kind(f"hook: {KEPT} → its hook `_backward_hooks[ID]` → closure cell `t` of function `tensor_hook.<locals>.hook` ({HERE}:LINE)")
def tensor_hook(t: torch.Tensor) -> Any:
    made = torch.zeros(1, requires_grad=True)

    def hook(gradient: torch.Tensor) -> None:
        t.zero_()

    made.register_hook(hook)
    return made


@kind(f"gradient: {KEPT} → its gradient, `.grad`")
def gradient(t: torch.Tensor) -> Any:
    big = torch.nn.Parameter(torch.empty(0))
    big.data = torch.zeros(1).expand(N)
    big.grad = t
    return big


@kind(f"dlpack: {KEPT} → a DLPack capsule that nobody has taken")
def dlpack_capsule(t: torch.Tensor) -> Any:
    return dlpack.to_dlpack(t)


@kind(f"array: {KEPT} → the memory it shares")
def numpy_array(t: torch.Tensor) -> Any:
    return t.numpy()


@kind(f"module global: {KEPT}")
def storage(t: torch.Tensor) -> Any:
    return t.untyped_storage()


@kind(f"autograd: {KEPT} → the autograd graph of `kept` (4 nodes), saved by MulBackward0")
def autograd_graph(t: torch.Tensor) -> Any:
    weight = torch.zeros((), requires_grad=True)
    return (weight * t).sum() + 1


@kind(f"autograd: {KEPT} → the autograd graph of `kept` (4 nodes), saved by ExpBackward0")
def autograd_own_result(t: torch.Tensor) -> Any:
    small = torch.zeros(1, requires_grad=True)
    big = small.expand(N).exp()
    return big.sum()


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(t)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        ctx.remembered = t
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


@kind(f"autograd: {KEPT} → the autograd graph of `kept` (2 nodes), saved by SavesBackward")
def autograd_custom(t: torch.Tensor) -> Any:
    return Saves.apply(torch.zeros(1, requires_grad=True), t)


@kind(f"autograd: {KEPT} → the autograd graph of `kept`, kept by RemembersBackward → its `remembered`")
def autograd_context(t: torch.Tensor) -> Any:
    return Remembers.apply(torch.zeros(1, requires_grad=True), t)


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str) -> None:
    global kept
    make_holder, expected = KINDS[name]
    kept = make_holder(make())
    try:
        found = find()
        assert words(found) == expected
        assert found["cure"]
        assert found["cycle"] is None
    finally:
        if isinstance(kept, (types.GeneratorType, types.CoroutineType)):
            kept.close()
        kept = None


# Places, not objects


def test_variable() -> None:
    x = make()
    assert words(find()) == f"variable: variable `x` in `test_variable` ({HERE}:LINE)"
    found = holders(x)
    assert found[0].kind == "variable"
    assert [step["function"] for step in found[0].steps] == ["test_variable"]
    assert found[0].steps[0]["file"] == __file__
    assert "del" in found[0].cure


@pytest.mark.parametrize(
    ("hold", "cure"),
    [
        (lambda t: t, "delete the variable (del), or let the function return"),
        (lambda t: (t,), "delete the variable (del), or let the function return"),
        (lambda t: [(1, t)], "take it out of `x` when you are done with it"),
        (lambda t: types.SimpleNamespace(seen={"a": [t]}), "take it out of `x.seen['a']` when you are done with it"),
        (lambda t: types.SimpleNamespace(a=types.SimpleNamespace(b=(t,))), "set `x.a.b` to None when you are done with it"),
        (lambda t: Slotted({t}), "take it out of `x.value` when you are done with it"),
    ],
)
def test_cure_names_what_to_clear(hold: Callable[[torch.Tensor], Any], cure: str) -> None:
    x = hold(make())
    assert find()["cure"] == cure
    del x


def test_cure_of_a_hook_that_collects() -> None:
    net = torch.nn.Linear(1, 1)
    net.features = []  # type: ignore[assignment]
    net.register_forward_hook(lambda module, args, result: module.features.append(result.detach()))
    net(torch.zeros(N, 1))
    found = find()
    assert "`net.features[0]`" in found["paths"][0]["words"]
    assert found["cure"] == "take it out of `net.features` when you are done with it"
    net.features.clear()  # type: ignore[operator]


def test_loop_variable_of_a_caller() -> None:
    def look() -> dict[str, Any]:
        return find()

    for batch in [make()]:  # noqa: B007
        found = look()
    assert words(found).startswith(f"variable: variable `batch` in `test_loop_variable_of_a_caller` ({HERE}:")
    del batch


def test_variable_in_a_closure() -> None:
    x = make()

    def use() -> torch.Tensor:
        return x

    found = [path["words"] for path in find()["paths"]]
    assert clean(found[0]) == f"variable `x` in `test_variable_in_a_closure` ({HERE}:LINE)"
    del use


def test_no_dict_of_locals_is_left() -> None:
    """Python before 3.13 would keep what `f_locals` once saw until the function returns."""
    x = make()
    holders(x)
    del x
    gone = [s for s in report(top=10_000).to_dict()["storages"] if s["bytes"] == 4 * N]
    assert not gone


def test_the_programs_own_locals_stay() -> None:
    x = 1
    mine = locals()
    report()
    x = 2  # noqa: F841
    assert mine["x"] == 1


def test_other_thread() -> None:
    ready, over = threading.Event(), threading.Event()

    def work(x: torch.Tensor) -> None:
        ready.set()
        over.wait()
        del x

    box = [make()]
    thread = threading.Thread(target=lambda: work(box.pop()), name="worker")
    thread.start()
    ready.wait()
    try:
        expected = f"thread: variable `x` in `work` ({HERE}:LINE, on thread `worker`)"
        assert words(find()) == expected
    finally:
        over.set()
        thread.join()


def test_report_from_another_thread() -> None:
    x = make()
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(find()))
    thread.start()
    thread.join()
    assert words(found[0]) == f"variable: variable `x` in `test_report_from_another_thread` ({HERE}:LINE)"
    del x


def test_last_traceback() -> None:
    def fail() -> None:
        x = make()
        raise ValueError(x.shape)

    try:
        fail()
    except ValueError as error:
        sys.last_traceback = error.__traceback__
    try:
        assert words(find()) == f"last traceback: `sys.last_traceback` → variable `x` in `fail` ({HERE}:LINE)"
    finally:
        del sys.last_traceback


def test_task() -> None:
    async def work() -> None:
        x = make()
        await asyncio.sleep(60)
        del x

    async def run() -> list[str]:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        found = [clean(path["words"]) for path in find()["paths"]]
        task.cancel()
        return found

    found = asyncio.run(run())
    assert found[0] == (
        f"variable `task` in `run` ({HERE}:LINE) → local `x` of the suspended coroutine `work` ({HERE}:LINE)"
    )


def test_exception_being_handled() -> None:
    def fail() -> None:
        x = make()
        raise ValueError(x.shape)

    try:
        fail()
    except ValueError:
        found = words(find())
    expected = f"the exception being handled (`ValueError`) → its traceback → variable `x` in `fail` ({HERE}:LINE)"
    assert found == f"exception: {expected}"


@pytest.fixture
def main() -> Iterator[dict[str, Any]]:
    """The names of the prompt."""
    names = vars(sys.modules["__main__"])
    before = dict(names)
    yield names
    for name in set(names) - set(before):
        del names[name]


def test_ipython_output(main: dict[str, Any]) -> None:
    output = {12: make()}
    main.update({"_oh": output, "Out": output, "_": output[12], "_12": output[12]})
    del output
    found = [f"{path['kind']}: {path['words']}" for path in find()["paths"]]
    assert found == [
        "prompt: `_` and `_12`, what IPython has shown",
        "prompt: `Out[12]`, what IPython has shown",
    ]


def test_prompt() -> None:
    import builtins

    builtins._ = make()  # type: ignore[attr-defined]
    try:
        assert words(find()) == "prompt: `_`, the value that the prompt showed last"
    finally:
        del builtins._  # type: ignore[attr-defined]


def test_names_of_main(main: dict[str, Any]) -> None:
    main["weights"] = {"first": make()}
    assert words(find()) == "registry: global `weights['first']`"


def test_current_context() -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("now")
    token = variable.set(make())
    try:
        assert words(find()) == "context variable: context variable `now`"
    finally:
        variable.reset(token)
        del token


# Storages


def test_view() -> None:
    x = torch.zeros(64 * MIB)
    x = x[:1]
    found = holders(x).storage
    assert found["view"] == "view of 256 MiB storage using 0.0 %"
    assert found["used_bytes"] == 4
    assert "clone()" in found["cure"]


def test_views_are_one_storage() -> None:
    x = make()
    views = [x[1:], x.view(1, N), x.detach()]
    found = find()
    assert found["tensors"] == 4
    assert found["view"] is None
    assert found["shape"] in ([N], [1, N])
    paths = {clean(path["words"]) for path in found["paths"]}
    assert f"variable `x` in `test_views_are_one_storage` ({HERE}:LINE)" in paths
    assert f"variable `views[0]` in `test_views_are_one_storage` ({HERE}:LINE)" in paths


def test_parameter() -> None:
    x = torch.nn.Parameter(make())
    found = find()
    assert found["is_parameter"]
    assert found["requires_grad"]
    assert found["dtype"] == "float32"
    assert found["device"] == "cpu"
    del x


class Wrapped(torch.Tensor):
    """A subclass that must not be asked."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("asked")


def test_subclass() -> None:
    x = make().as_subclass(Wrapped)
    assert words(find()).startswith("variable: variable `x`")
    del x


def test_sparse() -> None:
    x = torch.sparse_coo_tensor(torch.zeros(1, N, dtype=torch.int64), make(), (1,), check_invariants=True)
    assert words(find()).startswith("variable: variable `x`")
    del x


def test_all_roots_shortest_first() -> None:
    x = make()
    table = {"a": [x]}
    box = Plain(Plain(x))
    found = [clean(path.words) for path in holders(x)]
    where = f"in `test_all_roots_shortest_first` ({HERE}:LINE)"
    assert found == [
        f"variable `x` {where}",
        f"variable `table['a'][0]` {where}",
        f"variable `box.value.value` {where}",
    ]
    del table, box


def test_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="expected a tensor or a storage, got int"):
        holders(1)
    with pytest.raises(ValueError, match="no memory of its own"):
        holders(torch.empty(0))


# Cycles


def dead_cycle() -> None:
    made = Plain(make())
    made.other = made  # type: ignore[assignment]


@pytest.mark.usefixtures("no_gc")
def test_dead_cycle() -> None:
    dead_cycle()
    found = find()
    name = f"{__name__}.Plain"
    assert found["paths"] == []
    assert found["cycle"] == {
        "words": f"{name}.other → {name}; gc.collect() frees it",
        "collectable": True,
        "objects": [f"{name}.other"],
    }
    assert found["cure"] == "call gc.collect()"


@pytest.mark.usefixtures("no_gc")
def test_frozen_cycle() -> None:
    dead_cycle()
    gc.freeze()
    found = find()
    assert found["cycle"]["words"].endswith("frozen by gc.freeze(), so gc cannot free it until gc.unfreeze()")
    assert not found["cycle"]["collectable"]
    assert found["cure"] == "call gc.unfreeze(), then gc.collect()"


@pytest.mark.usefixtures("no_gc")
def test_hook_cycle() -> None:
    def build() -> None:
        module = torch.nn.Linear(1, 1)
        module.weight = torch.nn.Parameter(make())

        def hook(*args: Any) -> Any:
            return module.weight

        module.register_forward_hook(hook)

    build()
    found = find()
    words_of_it = clean(found["cycle"]["words"])
    assert "its hook `_forward_hooks[ID]`" in words_of_it
    assert "closure cell `module` of function `test_hook_cycle.<locals>.build.<locals>.hook`" in words_of_it
    assert found["cycle"]["collectable"]


@pytest.mark.usefixtures("no_gc")
def test_function_that_calls_itself() -> None:
    def load_state(depth: int) -> int:
        state = {"w": make()}

        def load(n: int) -> int:
            return load(n - 1) if n else len(state)

        return load(depth)

    load_state(2)
    found = find()
    assert "closure cell `load` of function `" in found["cycle"]["words"]
    assert found["cycle"]["collectable"]


@pytest.mark.usefixtures("no_gc")
def test_garbage_that_is_kept() -> None:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        dead_cycle()
        gc.collect()
        found = find()
        assert found["paths"][0]["kind"] == "garbage"
        assert found["paths"][0]["words"].startswith("`gc.garbage")
        assert "gc.garbage.clear()" in found["cure"]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_native_owner() -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()  # C++ holds the result
    future.set_result(make())
    found = find()
    assert words(found) == "native: a native owner that Python does not show"
    assert "C++" in found["cure"]
    del future


@pytest.mark.usefixtures("no_gc")
def test_cycle_with_a_native_owner() -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    made = make()
    made.me = made  # type: ignore[attr-defined]
    future.set_result(made)
    del made
    found = find()
    assert not found["cycle"]["collectable"]
    assert found["cycle"]["words"].endswith("something outside Python refers to it, so gc cannot free it")
    gc.collect()
    assert find()
    del future


def test_graph_that_sums_keep() -> None:
    total: Any = 0
    for _ in range(6):
        total = total + (make(requires_grad=True) * 2.0).sum()
    found = [s for s in report(top=10_000).to_dict()["storages"] if s["bytes"] == 4 * N]
    assert len(found) == 6
    for storage in found:
        path = storage["paths"][0]
        assert clean(path["words"]).startswith(
            f"variable `total` in `test_graph_that_sums_keep` ({HERE}:LINE) → the autograd graph of `total` (24 nodes)"
        )
        assert "detach()" in path["cure"]
    total = total.detach()
    assert not [s for s in report(top=10_000).to_dict()["storages"] if s["bytes"] == 4 * N]


# Programs that do not cooperate


class Hostile:
    """Nothing can be asked of it."""

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "value", value)

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    __repr__ = __str__ = __eq__ = __hash__ = __len__ = __iter__ = __bool__ = None  # type: ignore[assignment]

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise AssertionError("asked for its class")

    def __del__(self) -> None: ...


class HostileDict(dict[Any, Any]):
    def items(self) -> Any:
        raise AssertionError("asked for items")

    __iter__ = keys = values = items  # type: ignore[assignment]


class HostileList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("asked for items")


class HostileKey:
    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __repr__(self) -> str:
        raise AssertionError("shown")


class HostileMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __instancecheck__(cls, instance: object) -> bool:
        raise AssertionError("asked")

    __subclasscheck__ = __instancecheck__


@pytest.mark.parametrize(
    ("wrap", "suffix"),
    [
        (Hostile, ".value"),
        (lambda t: HostileDict({"k": t}), "['k']"),
        (lambda t: HostileList([t]), "[0]"),
        (lambda t: {HostileKey(): t}, f"[<{__name__}.HostileKey>]"),
        (lambda t: {"k" * 100: t}, f"['{'k' * 40}…']"),
        (lambda t: {0: t}, "[0]"),
    ],
)
def test_hostile(wrap: Callable[[torch.Tensor], Any], suffix: str) -> None:
    x = wrap(make())
    assert f"variable `x{suffix}` in" in find()["paths"][0]["words"]
    del x


@pytest.mark.parametrize(
    "hold",
    [
        lambda odd: [odd],
        lambda odd: {"k": odd},
        lambda odd: (odd,),
        lambda odd: {id(odd): odd}.values(),
        lambda odd: Plain(odd),
        lambda odd: Slotted(odd),
        lambda odd: lambda: odd,
        lambda odd: functools.partial(print, odd),
        lambda odd: collections.deque([odd]),
        lambda odd: ValueError(odd),
        lambda odd: iter([odd]),
        lambda odd: types.MethodType(print, odd),
    ],
)
def test_hostile_in_the_middle(hold: Callable[[Any], Any]) -> None:
    global kept
    kept = hold(Hostile(make()))
    try:
        found = find()["paths"][0]["words"]
        assert found.startswith("global `kept")
        assert "value" in found
        assert "no words" not in found
    finally:
        kept = None


def test_hostile_class() -> None:
    # Through the metaclass no attribute can be read, not even by `class` itself.
    made = HostileMeta("Made", (), {"stored": make()})
    assert ".stored`" in find()["paths"][0]["words"]
    del made


def test_instance_of_a_hostile_class() -> None:
    made = HostileMeta("Made", (), {})
    x = object.__new__(made)
    object.__setattr__(x, "value", make())
    found = find()["paths"][0]["words"]
    assert found.startswith("variable `x.value` in"), found
    del x


def test_replaced_dict() -> None:
    class Odd:
        __dict__ = property(lambda self: (_ for _ in ()).throw(AssertionError("asked")))  # type: ignore[assignment]

    x = Odd()
    object.__setattr__(x, "value", make())
    assert find()["paths"][0]["words"].startswith("variable `x")
    del x


# The search itself


def test_nothing_is_added_to_the_heap() -> None:
    tensors = [torch.zeros(1 + n) for n in range(100)]
    gc.collect()
    gc.disable()
    try:
        report()  # Python's lists of free tuples and such fill up.
        report()
        counts = [sys.getrefcount(tensor) for tensor in tensors]
        before = {id(made) for made in gc.get_objects()}
        blocks = sys.getallocatedblocks()
        made = report()
        del made
        blocks = sys.getallocatedblocks() - blocks
        assert [sys.getrefcount(tensor) for tensor in tensors] == counts
        after = gc.get_objects()
        added = [type(made).__name__ for made in after if id(made) not in before]
    finally:
        gc.enable()
    assert added == ["set"]  # `before`
    assert blocks < 200


def test_instances_get_no_dict() -> None:
    from lastref._lastref import heap_instance_values

    class Lean:
        def __init__(self, value: Any) -> None:
            self.value = value

    x = Lean(make())
    if heap_instance_values(x) is None:
        pytest.skip("this Python's layout is not known")
    assert "`x.value`" in find()["paths"][0]["words"]
    assert heap_instance_values(x) is not None


def test_truncated() -> None:
    found = report(seconds=0.0)
    assert found.to_dict()["truncated"]
    assert "stopped for want of time" in str(found)


def test_what_was_not_looked_at_is_no_native_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [make() for _ in range(5)]
    found = report(seconds=0.0)
    text = str(found)
    assert "native owner" not in text
    assert "not looked at in time" in text
    assert "seconds=" in text

    # Time is over while the storages are gone through.
    from lastref.torch import _report

    elapsed = _report._Search.elapsed
    monkeypatch.setattr(_report._Search, "elapsed", lambda self: elapsed(self) + 3 * hasattr(self, "is_over"))

    def paths(self: Any, held: Any, limit: int) -> Any:
        self.is_over = True
        return [], None

    monkeypatch.setattr(_report._Search, "paths", paths)
    data = report(top=1).to_dict()
    assert data["truncated"]
    assert [path["words"] for path in data["storages"][0]["paths"]] == ["not looked at in time"]
    del tensors


def test_many_threads() -> None:
    """Others make and drop objects meanwhile."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            made = Plain([torch.zeros(10), {}])
            made.other = made  # type: ignore[assignment]

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            x = make()
            assert any("variable `x`" in path for path in map(str, holders(x)))
            del x
    finally:
        over.set()
        for thread in threads:
            thread.join()
