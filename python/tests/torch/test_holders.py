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
    found = [storage for storage in report(top=10_000).to_dict()["storages"] if storage["bytes"] == num_bytes]
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
