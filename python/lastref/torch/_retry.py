"""Running a step again, smaller, after it ran out of device memory.

An exception refers to its traceback, the traceback to the frames of the failed attempt, and the frames to
their variables: tensors that stay allocated for as long as the exception is handled. So whoever tries
again inside the ``except`` block tries with less memory than the first time. `retry` leaves the block
first, and then lets go of what the failed attempt held:

1. The exception, and those it was raised from, are caught, noted as text, and the block is left.
2. The frames of the attempt are cleared, along ``__traceback__``, ``__context__``, ``__cause__`` and
   exception groups, for something else may refer to the exception. Frames that run, and those of an exception
   that was being handled when `retry` was called, are not of this attempt and stay.
3. The exception is dropped, the cycle collector runs, and the cache goes back to the device.

No frame of this module refers to an exception while an attempt runs.
"""

import functools
import gc
import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch

import lastref

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["retry"]

_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Smaller = (
    str | Mapping[str, Callable[[Any], Any]] | Callable[[tuple[Any, ...], dict[str, Any]], Any]
)

#: How often a step runs at most where ``smaller`` is given and ``attempts`` is not: a number below two to the
#: thirty-second has reached 1 by then.
MOST_ATTEMPTS = 32

# Out of memory on the device that libraries of CUDA report in words of their own.
_TEXTS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

_log = logging.getLogger("lastref.torch")


@overload
def retry(
    fn: Callable[..., _Result],
    /,
    *args: Any,
    smaller: Smaller | None = ...,
    attempts: int | None = ...,
    group: "ProcessGroup | None" = ...,
    **kwargs: Any,
) -> _Result: ...
@overload
def retry(
    fn: None = None,
    /,
    *,
    smaller: Smaller | None = ...,
    attempts: int | None = ...,
    group: "ProcessGroup | None" = ...,
) -> Callable[[_Function], _Function]: ...
def retry(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    smaller: Smaller | None = None,
    attempts: int | None = None,
    group: "ProcessGroup | None" = None,
    **kwargs: Any,
) -> Any:
    """Calls ``fn(*args, **kwargs)``, again with smaller arguments when it runs out of memory.

    Without ``fn`` it is a decorator: ``@retry(smaller="batch_size")``.

    >>> from lastref.torch import retry
    >>> import torch
    >>> def step(batch_size):
    ...     if batch_size > 20:
    ...         raise torch.OutOfMemoryError("CUDA out of memory")
    ...     return batch_size
    >>> retry(step, 64, smaller="batch_size")
    16

    The step must be one that can run twice: what it changed before it failed stays changed. Zero the
    gradients inside it, and take the batch outside of it. It draws new random numbers. Each new attempt is
    announced as a warning of the logger ``lastref.torch``.

    Args:
        fn: What to run. A function whose body runs later (a generator or a coroutine function) is
            refused.
        smaller: How the arguments become smaller. The name of an argument, an integer, which is halved down
            to 1. Or a dict from names to functions that make a smaller value of a value. Or a function
            that is called with the positional arguments as a tuple and the keyword arguments as a dict, and
            returns such a pair. A function that returns None says that there is nothing smaller. Without
            ``smaller``, the same arguments are used again.
        attempts: How often ``fn`` is called at most. At first as often as ``smaller`` has something
            smaller, 32 times at most; without ``smaller`` twice.
        group: Under an initialised process group of more than one rank, a group of CPU tensors
            (``torch.distributed.new_group(backend="gloo")``, made on all ranks). After each attempt its ranks
            vote: if one ran out of memory all try again smaller, also those that did not. All of them must call
            `retry` equally often, and no rank may wait in ``fn`` for one that ran out.

    Raises:
        torch.OutOfMemoryError: the last attempt ran out of memory too; a note on it says what was tried.
        RuntimeError: more than one rank, and no ``group``; or another rank gave up.
        TypeError: ``fn``, ``smaller`` or its results are of the wrong type.
        ValueError: ``attempts`` is less than 1, or ``group`` has no CPU tensors.

    Any other exception of ``fn`` leaves as it is.
    """
    if fn is None:
        if args or kwargs:
            raise TypeError("retry: arguments for a function, but no function")

        def decorate(function: _Function) -> _Function:
            _check_function(function)

            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return _run(function, args, kwargs, smaller, attempts, group)

            return cast(_Function, run)

        _check_attempts(attempts)
        return decorate
    _check_function(fn)
    _check_attempts(attempts)
    return _run(fn, args, kwargs, smaller, attempts, group)


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    smaller: Smaller | None,
    attempts: int | None,
    group: "ProcessGroup | None",
) -> Any:
    _check_group(group)
    if attempts is None:
        attempts = 2 if smaller is None else MOST_ATTEMPTS
    tried: list[str] = []
    for attempt in range(1, attempts + 1):
        result: Any = None
        failure: Exception | None = None
        following: _Arguments | None = None
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                if group is not None:
                    _vote(group, failed=True, gives_up=True)
                raise
            failure = error
        # The except block is left.
        try:
            if failure is None and group is None:
                return _check_result(result)
            is_last = attempt == attempts
            if failure is not None and not is_last:
                # What the last attempt held is left for a debugger to see.
                clear_frames(failure, keep=sys.exception())
            if not is_last:
                following = _make_smaller(fn, args, kwargs, smaller)
            gives_up = following is None
            if group is not None:
                failed, gives_up = _vote(group, failed=failure is not None, gives_up=gives_up)
                if not failed:
                    return _check_result(result)
            words = _words_for(fn, args, kwargs, smaller)
            tried.append(f"{words}: {_first_line(failure)}")
            if following is None or gives_up:
                if failure is None:
                    raise RuntimeError(
                        "retry: another rank failed, and the ranks do not all have something smaller to try"
                    )
                _add_note(failure, tried)
                raise failure
        finally:
            # The traceback of the exception refers to this frame.
            result = failure = None
        args, kwargs = following
        following = None
        release()
        _log.warning(
            "retry: out of memory with %s; trying again with %s",
            words,
            _words_for(fn, args, kwargs, smaller),
        )
    raise AssertionError("the last attempt returns or raises")


def _check_result(result: Any) -> Any:
    if isinstance(result, types.CoroutineType):
        result.close()
        raise TypeError(
            "retry: the function returned a coroutine, whose body has not run; give one that runs all of it"
        )
    return result


# The arguments


def _make_smaller(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], smaller: Smaller | None
) -> _Arguments | None:
    """The arguments of the next attempt, or None if there are none."""
    if smaller is None:
        return args, kwargs
    if isinstance(smaller, str):
        return _replace(fn, args, kwargs, {smaller: functools.partial(_halve, smaller)})
    if isinstance(smaller, Mapping):
        return _replace(fn, args, kwargs, smaller)
    if not callable(smaller):
        raise TypeError(
            f"retry: smaller is a name, a dict or a function, not {type(smaller).__name__}"
        )
    made = smaller(args, kwargs)
    if made is None:
        return None
    match made:
        case (tuple(new_args), dict(new_kwargs)):
            return new_args, new_kwargs
    raise TypeError(
        "retry: smaller must return a pair of a tuple and a dict, the arguments, or None"
    )


def _replace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    functions: Mapping[str, Callable[[Any], Any]],
) -> _Arguments | None:
    bound = inspect.signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    keywords = next(
        (p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None
    )
    for name, function in functions.items():
        holder = bound.arguments
        if name not in holder and keywords is not None and name in holder[keywords]:
            holder = holder[keywords]
        if name not in holder:
            names = ", ".join(bound.signature.parameters) or "none"
            raise TypeError(
                f"retry: the function has no argument {name!r} to make smaller; it has: {names}"
            )
        value = function(holder[name])
        if value is None:
            return None
        holder[name] = value
    return bound.args, bound.kwargs


def _halve(name: str, value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"retry: {name} is {type(value).__name__}, and only an integer is halved; give a function that makes it "
            f"smaller: smaller={{{name!r}: lambda {name}: ...}}"
        )
    return value // 2 if value > 1 else None


def _words_for(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], smaller: Smaller | None
) -> str:
    """What of the arguments changes between attempts, in words: ``batch_size=32``."""
    if smaller is None:
        return "the same arguments"
    if callable(smaller):
        values = [_short(value) for value in args] + [
            f"{name}={_short(v)}" for name, v in kwargs.items()
        ]
        return ", ".join(values) or "no arguments"
    bound = inspect.signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    flat = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            flat |= flat[parameter.name]
    return ", ".join(
        f"{name}={_short(flat[name])}"
        for name in ([smaller] if isinstance(smaller, str) else smaller)
    )


def _short(value: Any) -> str:
    """A value in few words, and without asking the device."""
    if isinstance(value, int | float | str | None):
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{type(value).__name__}{list(shape)}"
    if isinstance(value, list | tuple | dict | set):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


# What failed


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that device memory ran out; a group does if all in it do."""
    if isinstance(error, torch.OutOfMemoryError | lastref.OutOfMemoryError):
        return True
    if isinstance(error, BaseExceptionGroup):
        return all(is_out_of_memory(inner) for inner in error.exceptions)
    if not isinstance(error, RuntimeError):
        return False
    try:
        words = str(error)
    except Exception:  # the program's own class; its error leaves, not this one
        return False
    return any(text in words for text in _TEXTS)


def _first_line(error: BaseException | None) -> str:
    if error is None:
        return "another rank ran out of memory"
    text = str(error).strip().partition("\n")[0]
    return text.partition(" GPU ")[0] if len(text) > 120 else text


def _add_note(failure: BaseException, tried: list[str]) -> None:
    times = "once" if len(tried) == 1 else f"{len(tried)} times"
    failure.add_note("\n".join([f"lastref: tried {times}:", *(f"  {line}" for line in tried)]))


# Letting go


def clear_frames(error: BaseException, keep: BaseException | None = None) -> None:
    """Clears the variables of the frames that the error refers to.

    That is along ``__traceback__``, ``__context__``, ``__cause__`` and the members of groups. Frames that run or
    are suspended stay, and so do those of ``keep`` and of what it refers to in the same way.
    """
    kept = {id(other) for other in chain(keep)}
    for other in chain(error):
        if id(other) in kept:
            continue
        traceback = other.__traceback__
        while traceback is not None:
            _clear(traceback.tb_frame)
            traceback = traceback.tb_next


def chain(error: BaseException | None) -> list[BaseException]:
    """The error and all that it refers to as an error, each once."""
    found: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in found:
            continue
        found[id(error)] = error
        waiting += [error.__context__, error.__cause__]
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
    return list(found.values())


_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def _clear(frame: types.FrameType) -> None:
    if frame.f_code.co_flags & _SUSPENDABLE and sys.version_info < (3, 13):
        # Before 3.13 clearing the frame of a suspended generator closes the generator, and only the
        # generator knows that it is suspended.
        if any(isinstance(owner, _GENERATORS) for owner in gc.get_referrers(frame)):
            return
    try:
        frame.clear()
    except RuntimeError:
        pass  # it runs, or is suspended


def release() -> None:
    """Runs the cycle collector, and gives the caches back to the devices."""
    lastref.gc.collect()
    cuda: Any = torch.cuda  # its functions have no types
    if cuda.is_initialized() and not cuda.is_current_stream_capturing():
        cuda.empty_cache()
    if lastref.cuda.is_available():
        lastref.cuda.empty_cache()


# More than one rank


def _check_group(group: "ProcessGroup | None") -> None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        if group is not None:
            raise ValueError("retry: a group was given, but torch.distributed is not initialised")
        return
    if group is None:
        if (size := distributed.get_world_size()) > 1:
            raise RuntimeError(
                f"retry: this is one of {size} ranks, and one that tries again alone leaves the others waiting; make a "
                'group on all ranks, torch.distributed.new_group(backend="gloo"), and give it as group= for them to agree'
            )
        return
    if "cpu:" not in str(distributed.get_backend_config(group)):
        raise ValueError(
            "retry: the ranks vote with tensors on the CPU, which the given group cannot send; make one with "
            'torch.distributed.new_group(backend="gloo")'
        )


def _vote(group: "ProcessGroup", *, failed: bool, gives_up: bool) -> tuple[bool, bool]:
    """Whether any rank ran out of memory, and whether any has nothing smaller to try. Waits for all ranks."""
    votes = torch.tensor([failed, gives_up], dtype=torch.int32)
    try:
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX, group)
    except RuntimeError as error:
        raise RuntimeError(
            "retry: not all ranks came to vote on trying again; each must call retry equally often, and none may wait "
            "in the function for one that ran out of memory"
        ) from error
    any_failed, any_gives_up = votes.tolist()
    return bool(any_failed), bool(any_gives_up)


# Functions that run later


def _check_function(fn: object) -> None:
    if not callable(fn):
        raise TypeError(
            f"retry: the first argument is the function to run, not {type(fn).__name__}"
        )
    inner = inspect.unwrap(fn)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    if not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = type(inner).__call__  # an object that can be called
    for check, words in (
        (inspect.iscoroutinefunction, "coroutine"),
        (inspect.isasyncgenfunction, "asynchronous generator"),
        (inspect.isgeneratorfunction, "generator"),
    ):
        if check(inner):
            raise TypeError(
                f"retry: a {words} function only returns an object, and its body runs after retry has returned; give a "
                "function that runs all of it"
            )


def _check_attempts(attempts: int | None) -> None:
    if attempts is not None and attempts < 1:
        raise ValueError(f"retry: attempts is {attempts}; the function runs at least once")
