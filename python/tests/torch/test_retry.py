"""`lastref.torch.retry`. What needs no device runs here; the rest in processes of its own."""

import functools
import gc
import logging
import pathlib
import subprocess
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lastref
from lastref.torch import retry

RunTorch = Callable[..., subprocess.CompletedProcess[str]]


class Large:
    """Stands for a tensor: how many are alive is what is counted."""

    alive = 0

    def __init__(self) -> None:
        Large.alive += 1
        weakref.finalize(self, Large.gone)

    @staticmethod
    def gone() -> None:
        Large.alive -= 1


@pytest.fixture(autouse=True)
def nothing_is_alive() -> Iterator[None]:
    gc.collect()
    assert Large.alive == 0
    yield
    gc.collect()
    assert Large.alive == 0


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has ...\nmore"
    )


# What it calls


def needs_at_most(limit: int) -> Callable[..., int]:
    def step(batch_size: int, scale: float = 1.0) -> int:
        if batch_size > limit:
            raise out_of_memory()
        return batch_size

    return step


def test_returns_the_first_result_that_fits() -> None:
    assert retry(needs_at_most(20), 64, smaller="batch_size") == 16
    assert retry(needs_at_most(20), batch_size=64, smaller="batch_size") == 16
    assert retry(needs_at_most(64), 64, smaller="batch_size") == 64


def test_smaller_is_a_name_a_dict_or_a_function() -> None:
    assert retry(needs_at_most(20), 64, smaller={"batch_size": lambda n: n - 10}) == 14
    assert (
        retry(needs_at_most(20), 64, smaller=lambda args, kwargs: ((args[0] - 11,), kwargs)) == 20
    )


def test_a_default_and_a_keyword_can_become_smaller() -> None:
    def step(a: int = 8, **others: int) -> tuple[int, int]:
        if a + others["b"] > 8:
            raise out_of_memory()
        return a, others["b"]

    assert retry(step, b=4, smaller="a") == (4, 4)
    assert retry(step, b=8, a=4, smaller="b") == (4, 4)


def test_decorator_keeps_the_function() -> None:
    @retry(smaller="batch_size")
    def step(batch_size: int) -> int:
        """What it does."""
        return needs_at_most(20)(batch_size)

    assert step(64) == step(batch_size=64) == 16
    assert (step.__name__, step.__doc__) == ("step", "What it does.")


def test_a_method_can_be_decorated() -> None:
    class Trainer:
        limit = 20

        @retry(smaller="batch_size")
        def step(self, batch_size: int) -> int:
            return needs_at_most(self.limit)(batch_size)

    assert Trainer().step(64) == 16


# When it gives up


def test_the_last_error_says_what_was_tried() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        retry(needs_at_most(0), 4, smaller="batch_size")
    first = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has ..."
    assert caught.value.__notes__ == [
        f"lastref: tried 3 times:\n  batch_size=4: {first}\n  batch_size=2: {first}\n  batch_size=1: {first}"
    ]
    assert caught.value.__context__ is None


def test_attempts_bound_the_calls() -> None:
    calls = []

    def step(n: int) -> None:
        calls.append(n)
        raise out_of_memory()

    for attempts, wanted in ((1, [8]), (3, [8, 4, 2])):
        calls.clear()
        with pytest.raises(torch.OutOfMemoryError):
            retry(step, 8, smaller="n", attempts=attempts)
        assert calls == wanted
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        retry(step, 8)
    assert calls == [8, 8], "without smaller, twice"


def test_none_from_smaller_ends_it() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        retry(needs_at_most(0), 4, smaller={"batch_size": lambda n: None})
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        retry(needs_at_most(0), 4, smaller=lambda args, kwargs: None)


def test_other_errors_leave_at_once() -> None:
    calls = []

    def step(error: BaseException) -> None:
        calls.append(error)
        raise error

    for error in (
        ValueError("x"),
        RuntimeError("CUDA error: an illegal memory access"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)) as caught:
            retry(step, error)
        assert caught.value is error
    assert len(calls) == 3


@pytest.mark.parametrize(
    "error",
    [
        out_of_memory(),
        lastref.OutOfMemoryError("out of memory"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ExceptionGroup("two tasks", [out_of_memory(), ExceptionGroup("inner", [out_of_memory()])]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_counts_as_out_of_memory(error: BaseException) -> None:
    errors = [error]

    def step() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert retry(step) == "done"


def test_an_error_that_cannot_be_shown_leaves_as_it_is() -> None:
    class Mute(RuntimeError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    def step() -> None:
        raise Mute

    with pytest.raises(Mute):
        retry(step)


def test_a_group_with_another_error_is_not_out_of_memory() -> None:
    with pytest.raises(ExceptionGroup):
        retry(
            lambda: (_ for _ in ()).throw(
                ExceptionGroup("two tasks", [out_of_memory(), ValueError("x")])
            )
        )


# What it lets go of. The errors are kept, as a logger or a debugger would keep them.

kept: list[BaseException] = []


def fail_plainly() -> None:
    large = Large()
    raise keep(out_of_memory())


def fail_deep_inside() -> None:
    large = Large()
    fail_plainly()


def fail_in_a_handler() -> None:
    large = Large()
    try:
        fail_plainly()
    except RuntimeError:
        other = Large()
        raise keep(out_of_memory())  # the first is its __context__


def fail_from_another() -> None:
    try:
        fail_plainly()
    except RuntimeError as error:
        cause = error
    large = Large()
    raise keep(out_of_memory()) from cause


def fail_with_its_context_hidden() -> None:
    try:
        fail_plainly()
    except RuntimeError:
        raise keep(out_of_memory()) from None


def fail_as_a_group() -> None:
    errors = []
    for _ in range(2):
        try:
            fail_plainly()
        except RuntimeError as error:
            errors.append(error)
    raise keep(ExceptionGroup("two", errors))


def fail_in_a_generator() -> None:
    def batches() -> Iterator[int]:
        large = Large()
        yield 1
        fail_plainly()

    for _ in batches():
        pass


def fail_in_a_cycle() -> None:
    large = Large()
    large.me = large  # type: ignore[attr-defined]
    error = keep(out_of_memory())
    raise error


def keep(error: Any) -> Any:
    kept.append(error)
    return error


@pytest.mark.parametrize(
    "fail",
    [
        fail_plainly,
        fail_deep_inside,
        fail_in_a_handler,
        fail_from_another,
        fail_with_its_context_hidden,
        fail_as_a_group,
        fail_in_a_generator,
        fail_in_a_cycle,
    ],
    ids=lambda function: function.__name__,
)
def test_lets_go_of_the_failed_attempt(fail: Callable[[], None]) -> None:
    gc.disable()
    attempts = []

    def step() -> int:
        attempts.append(Large.alive)
        if len(attempts) == 1:
            fail()
        return Large.alive

    try:
        assert retry(step) == 0, "nothing of the first attempt is alive in the second"
        assert kept, "the error itself is still referred to"
        assert attempts == [0, 0]
    finally:
        kept.clear()
        gc.enable()


def test_inside_an_except_block_of_the_caller_only_the_attempt_is_cleared() -> None:
    def outer() -> None:
        outside = Large()
        raise ValueError("being handled")

    tried = []

    def step() -> int:
        tried.append(1)
        if len(tried) == 1:
            fail_plainly()
        return Large.alive

    try:
        outer()
    except ValueError as error:
        assert retry(step) == 1, "what the caller's own exception holds is the caller's"
        assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
        assert "outside" in error.__traceback__.tb_next.tb_frame.f_locals
    kept.clear()


def test_a_suspended_generator_goes_on() -> None:
    errors = []

    def batches() -> Iterator[int]:
        try:
            yield 1
        except RuntimeError as error:
            errors.append(error)  # its traceback has this frame, which goes on
        yield 2
        yield 3

    source = batches()
    assert next(source) == 1
    tried = []

    def step() -> int:
        tried.append(1)
        if len(tried) == 1:
            assert source.throw(out_of_memory()) == 2
            raise errors.pop()
        return next(source)

    assert retry(step) == 3


def test_no_exception_is_referred_to_while_an_attempt_runs() -> None:
    errors = []

    def step() -> int:
        if not errors:
            error = out_of_memory()
            # The exception type of torch has no weak references of its own.
            errors.append(weakref.ref(Attached.to(error)))
            raise error
        return sum(reference() is not None for reference in errors)

    gc.disable()
    try:
        assert retry(step) == 0
    finally:
        gc.enable()


class Attached:
    @staticmethod
    def to(error: Any) -> "Attached":
        error.attached = Attached()
        return error.attached  # type: ignore[no-any-return]


def test_the_last_error_is_freed_when_it_is_dropped() -> None:
    gc.disable()
    try:
        try:
            retry(lambda: fail_plainly(), attempts=1)
        except torch.OutOfMemoryError:
            kept.clear()
            assert Large.alive == 1, "a debugger can look at the last attempt"
        assert Large.alive == 0, "without a collection"
    finally:
        gc.enable()


def test_says_that_it_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    retry(needs_at_most(20), 64, smaller="batch_size")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert (
        caplog.messages[0]
        == "retry: out of memory with batch_size=64; trying again with batch_size=32"
    )


# What it refuses


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def asynchronous_generator() -> Any:
    yield 1


class Callable_:
    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: retry(coroutine), TypeError, "a coroutine function only returns an object"),
        (lambda: retry(generator), TypeError, "a generator function only"),
        (lambda: retry(asynchronous_generator), TypeError, "an? asynchronous generator function"),
        (lambda: retry(functools.partial(generator)), TypeError, "a generator function only"),
        (lambda: retry(Callable_()), TypeError, "a generator function only"),
        (lambda: retry()(generator), TypeError, "a generator function only"),
        (lambda: retry(lambda: coroutine()), TypeError, "returned a coroutine"),
        (lambda: retry(3), TypeError, "the function to run, not int"),  # type: ignore[call-overload]
        (
            lambda: retry(needs_at_most(1), 4, smaller="size"),
            TypeError,
            "no argument 'size' .* batch_size, scale",
        ),
        (
            lambda: retry(needs_at_most(1), 4, smaller="scale"),
            TypeError,
            "scale is float.*lambda scale",
        ),
        (lambda: retry(needs_at_most(1), 4, smaller=3), TypeError, "not int"),  # type: ignore[call-overload]
        (lambda: retry(needs_at_most(1), 4, smaller=lambda a, k: 3), TypeError, "a pair"),
        (lambda: retry(needs_at_most(1), 4, attempts=0), ValueError, "at least once"),
    ],
)
def test_refuses(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


# On a device


def test_retry_inside_except_fails_and_retry_succeeds(run_torch: RunTorch) -> None:
    """The same step, in one process: the first way is how people write it."""
    program = """
import torch
from lastref.torch import retry

MIB = 1 << 20

def step(mib):
    activations = torch.empty(6000 * MIB, dtype=torch.uint8, device="cuda")
    more = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
    return more.numel() // MIB

def plain():
    try:
        return step(6000)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return step(3000)

try:
    print("plain:", plain())
except torch.OutOfMemoryError:
    print("plain: out of memory")
assert torch.cuda.memory_allocated() == 0
print("retry:", retry(step, 6000, smaller="mib"))
"""
    done = run_torch("-c", program)
    assert done.stdout == "plain: out of memory\nretry: 3000\n"
    assert "retry: out of memory with mib=6000; trying again with mib=3000" in done.stderr


def test_retry_of_a_training_step(run_torch: RunTorch) -> None:
    """Forward, backward and optimizer, where the memory is held by autograd."""
    program = """
import torch
from lastref.torch import retry

weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)

def step(batch_size):
    optimizer.zero_grad(set_to_none=True)
    x = weight.expand(batch_size, -1).clone()
    for _ in range(8):
        x = x.sin()
    x.sum().backward()
    optimizer.step()
    return batch_size

print(retry(step, 1024, smaller="batch_size"))
print(weight.requires_grad, torch.is_grad_enabled(), weight.grad is not None)
"""
    done = run_torch("-c", program)
    assert done.stdout.splitlines() == ["128", "True True True"]


# More than one rank


RANK = """
import datetime, sys, torch, torch.distributed as dist
from lastref.torch import retry
import logging; logging.disable()

rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
calls = []
def step(batch_size):
    calls.append(batch_size)
    if how == "error" and rank == 1:
        raise ValueError("not memory")
    if rank == 1 and batch_size > 20 or how == "never" and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return batch_size
try:
    group = None if how == "none" else dist.new_group(backend="gloo")
    print(rank, retry(step, 64, smaller="batch_size", group=group), calls)
except (RuntimeError, ValueError) as error:
    print(rank, type(error).__name__, str(error).partition(",")[0], calls)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("none", ["{} RuntimeError retry: this is one of 2 ranks []"] * 2),
        ("agree", ["{} 16 [64, 32, 16]"] * 2),
        (
            "never",
            [
                "0 RuntimeError retry: another rank failed [64, 32, 16, 8, 4, 2, 1]",
                "1 OutOfMemoryError CUDA out of memory [64, 32, 16, 8, 4, 2, 1]",
            ],
        ),
        (
            "error",
            ["0 RuntimeError retry: another rank failed [64]", "1 ValueError not memory [64]"],
        ),
    ],
)
def test_ranks_agree(
    how: str, wanted: list[str], run_torch: RunTorch, tmp_path: pathlib.Path
) -> None:
    program = f"""
import subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", {RANK!r}, str(rank), {str(tmp_path / "store")!r}, {how!r}])
    for rank in range(2)
]
sys.exit(max(rank.wait(120) for rank in ranks))
"""
    done = run_torch("-c", program)
    assert sorted(done.stdout.splitlines()) == [
        line.format(rank) for rank, line in enumerate(wanted)
    ]
