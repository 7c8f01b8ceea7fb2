"""Who holds an object, in words: ways through the heap become variables, attributes, and causes.

The ways come from `lastref._lastref.Heap`; here each of their edges is looked at, and gets the name
under which a person knows it. No code of the program is run for it: nothing is compared or shown but
strings, numbers and the identity of objects; attributes are read through the types' own descriptors.
"""

import _thread
import collections
import contextvars
import functools
import gc
import logging
import os
import queue
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._lastref import Heap, heap_frame_variables, heap_instance_values

OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep

CURES = {
    "autograd": "keep `x.detach()` or `x.item()` instead of `x`, or compute under torch.no_grad()",
    "gradient": "call zero_grad(set_to_none=True) when the gradients have been used",
    "view": "keep `view.clone()` instead of the view, and let go of the large tensor",
    "last traceback": "delete sys.last_traceback, sys.last_value and sys.last_exc, or raise another error",
    "exception": "leave the except block before you go on, or drop the exception; traceback.clear_frames() lets go of its variables",
    "prompt": "delete the variable, and run %reset -f out; `_`, `__` and `Out` keep what the prompt showed",
    "garbage": "switch gc.DEBUG_SAVEALL off and call gc.garbage.clear()",
    "lru_cache": "call cache_clear() on the cached function, or do not pass or return tensors through it",
    "closure": "let go of the function, or pass it the tensor as an argument instead",
    "default argument": "use None as the default and make the tensor inside the function",
    "partial": "let go of the functools.partial",
    "generator": "finish the generator or call its close()",
    "thread local": "delete the attribute on the thread that set it, or end the thread",
    "thread": "end the thread, or delete the variable in the function it runs",
    "queue": "take the item out of the queue",
    "logging": "log numbers or strings instead of tensors, and flush the handler",
    "future": "let go of the future when you have its result",
    "context variable": "reset the variable with its token, or set it to None",
    "finalizer": "do not give the tensor to weakref.finalize; call the finalizer or its detach()",
    "optimizer": "delete the optimizer along with the model; zero_grad() does not free its state",
    "hook": "remove the hook by its handle's remove()",
    "dlpack": "let the other library take the capsule, or delete it",
    "array": "delete the NumPy array, or keep a copy() of it",
    "variable": "delete the variable (del), or let the function return",
    "module global": "delete the global (del), or set it to None",
    "registry": "take the tensor out of the container when you are done with it",
    "class attribute": "delete the class's attribute",
    "module attribute": "delete the module and all that refers to it",
    "object": "let go of the object named first",
    "in progress": "it goes when the expression, the loop or the call that uses it is done",
    "late": "give report(seconds=…) more",
    "native": "look for libraries that hold tensors in C++: communication, compiled graphs, dataloaders",
}

# From the most telling to the least: what a path is called if it goes through several.
_RANKS = {
    kind: rank
    for rank, kind in enumerate([
        "garbage", "last traceback", "prompt", "exception", "autograd", "gradient", "finalizer", "logging",
        "future", "lru_cache", "hook", "optimizer", "dlpack", "array", "queue", "thread local",
        "context variable", "generator", "default argument", "partial", "closure", "thread",
        "class attribute", "module attribute", "registry", "variable", "module global", "object",
    ])
}  # fmt: skip

#: Of these kinds, the attribute or container that has the tensor tells better what to do.
_NAMED = frozenset([
    "variable", "thread", "module global", "registry", "class attribute", "module attribute", "closure",
    "default argument", "thread local", "object",
])  # fmt: skip
_IN_PROGRESS = "a value in progress"

_LRU_CACHE: type = vars(functools)["_lru_cache_wrapper"]
_MAX_KEY = 40
#: Of a way with more objects than a few times this only the first and the last are told.
_LONG = 24
_MAX_ITEMS = 1_000_000
_HOOKS = frozenset([
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_post_accumulate_grad_hooks", "_forward_hooks_with_kwargs",
])  # fmt: skip
_PARTS = frozenset(["_parameters", "_buffers", "_modules"])
_LAST = frozenset(["last_traceback", "last_value", "last_exc", "last_type"])


class Path(NamedTuple):
    """One way from something that needs no holder to the tensor."""

    words: str
    """The way, as a person would say it."""
    kind: str
    """What holds it: a key of the table of cures."""
    steps: tuple[dict[str, Any], ...]
    """The parts of `words`: each a dict of ``text``, ``kind`` and ``type``."""
    cure: str
    """What lets go of it."""

    def __str__(self) -> str:
        return self.words

    def to_dict(self) -> dict[str, Any]:
        return {
            "words": self.words,
            "kind": self.kind,
            "steps": [dict(step) for step in self.steps],
            "cure": self.cure,
        }


# Reading without running code


def _of_type(name: str, cls: type) -> Any:
    """An attribute of a class, past its metaclass."""
    return vars(type)[name].__get__(cls)


def type_name(value: object) -> str:
    """The name of the value's type, with its module unless that is builtins."""
    return class_name(type(value))


def class_name(cls: type) -> str:
    module = _of_type("__module__", cls)
    name = _of_type("__qualname__", cls)
    plain = type(module) is str and module not in ("builtins", "__main__")
    return f"{module}.{name}" if plain else str(name)


def short_name(value: object) -> str:
    """The name of the value's type alone."""
    return str(_of_type("__name__", type(value)))


def mro(value: object) -> tuple[type, ...]:
    found: tuple[type, ...] = _of_type("__mro__", type(value))
    return found


def namespace(cls: type) -> types.MappingProxyType[str, Any]:
    """The class's own dict."""
    found: types.MappingProxyType[str, Any] = _of_type("__dict__", cls)
    return found


def instance_dict(value: object) -> dict[str, Any] | None:
    """The instance's dict, if there is one already."""
    if heap_instance_values(value) is not None:
        return None
    for cls in mro(value):
        descriptor: Any = namespace(cls).get("__dict__")
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            try:
                found = descriptor.__get__(value)
            except (AttributeError, TypeError):
                return None
            attributes: dict[str, Any] | None = found if isinstance_plain(found, dict) else None
            return attributes
    return None


def attributes_of(value: object) -> dict[str, Any]:
    """The instance's attributes, in its dict or not."""
    found = instance_dict(value)
    return found if found is not None else dict(heap_instance_values(value) or ())


def isinstance_plain(value: object, *classes: type) -> bool:
    """`isinstance` without asking the value, whose class may pretend."""
    return any(cls in classes for cls in mro(value))


def items_of(value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return dict.items(value)


def plain(text: str) -> str:
    """The text with what would act on a terminal, or end a line, written out. Names can be anything."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def key_words(key: object) -> str:
    """A dict's key as it is written."""
    if type(key) is int and key.bit_length() > 128:
        return "<int>"
    if type(key) in (int, bool, float, type(None)):
        return repr(key)
    if type(key) is str:
        return repr(key if len(key) <= _MAX_KEY else key[:_MAX_KEY] + "…")
    if type(key) is tuple and len(key) <= 3:
        return "(" + ", ".join(key_words(part) for part in key) + ")"
    return f"<{type_name(key)}>"


def function_words(value: object) -> str:
    """A function's name and place."""
    code = getattr(value, "__code__", None) if type(value) is types.FunctionType else None
    if code is None:
        return f"`{type_name(value)}`"
    return f"`{value.__qualname__}` ({place(code.co_filename, code.co_firstlineno)})"  # type: ignore[attr-defined]


def place(filename: str, line: int | None) -> str:
    """A file and line, as short as it stays clear."""
    name = filename if filename.startswith("<") else os.path.basename(filename)
    return f"{name}:{line}" if line else name


def thread_words(thread: int | None) -> str:
    """Which thread, unless it is the main one."""
    if thread is None or thread == threading.main_thread().ident:
        return ""
    for known in list(threading._active.values()):  # type: ignore[attr-defined]
        if isinstance_plain(known, threading.Thread):
            attributes = attributes_of(known)
            if attributes.get("_ident") == thread:
                return f", on thread `{attributes.get('_name')}`"
    return f", on thread {thread}"


# From a way to words


class _Writer:
    """Collects the parts of a path's words, edge by edge."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.grows = False
        #: What lets go of the object that the words have come to, where its name says so.
        self.cure: str | None = None

    def start(self, text: str, kind: str, of: object, *, grows: bool = False, **more: Any) -> None:
        """Begins a new part. `grows`: attributes and indices that follow belong to the name in ticks."""
        self.steps.append({"text": plain(text), "kind": kind, "type": plain(type_name(of)), **more})
        self.grows = grows
        self.cure = None

    def suffix(self, text: str, of: object, kind: str | None = None, *, stays: bool = False) -> None:
        """Adds an attribute or an index; `stays`: it cannot be taken away, but what it belongs to can."""
        if not self.steps or not self.grows:
            name = text.removeprefix(".")
            # A cycle begins with an object that has no name.
            is_first = bool(self.steps) and not self.steps[-1]["text"]
            self.start(f"its `{name}`" if self.steps and not is_first else f"`{name}`", kind or "object", of, grows=True)
            return
        step = self.steps[-1]
        head, _, rest = step["text"].partition("`")
        name, _, tail = rest.partition("`")
        step["text"] = f"{head}`{name}{plain(text)}`{tail}"
        step["type"] = plain(type_name(of))
        if kind is not None:
            self.cure = None
        elif not stays:
            is_attribute = text.startswith(".")
            what = f"set `{name}{plain(text)}` to None" if is_attribute else f"take it out of `{name}`"
            self.cure = f"{what} when you are done with it"
        if kind is not None and _RANKS.get(kind, 99) < _RANKS.get(step["kind"], 99):
            step["kind"] = kind


def describe(root: str, name: str | None, thread: int | None, objects: list[Any]) -> Path:
    """Words for a way through the heap, from its root to the tensor."""
    writer = _Writer()
    try:
        at = _begin(writer, root, name, thread, objects)
        while at < len(objects) - 1:
            if at >= _LONG and len(objects) - at > 2 * _LONG:
                skipped = len(objects) - _LONG - at
                at += skipped
                writer.start(f"… {skipped} objects further …", "object", objects[at])
            at = _edge(writer, objects, at)
    except Exception as error:  # A report is made when things have gone wrong already.
        types_ = " → ".join(type_name(value) for value in objects[:_LONG])
        writer.start(f"{types_} (no words for it: {short_name(error)})", "object", objects[-1])
    return finish(writer.steps, writer.cure)


def finish(steps: list[dict[str, Any]], cure: str | None = None) -> Path:
    """A path of these steps, and what lets go of what they end at if that has an owner with a name."""
    words = " → ".join(step["text"] for step in steps if step["text"])
    kinds = [step["kind"] for step in steps]
    kind = min(kinds, key=lambda kind: _RANKS.get(kind, 99)) if kinds else "object"
    if cure is None or kind not in _NAMED:
        cure = CURES.get(kind, CURES["object"])
        if any(step["text"].startswith(_IN_PROGRESS) for step in steps) and kind in _NAMED:
            cure = CURES["in progress"]
    return Path(words, kind, tuple(steps), cure)


def _begin(
    writer: _Writer, root: str, name: str | None, thread: int | None, objects: list[Any]
) -> int:
    """Words for the root; returns the position of the last object that they cover."""
    first = objects[0]
    if root == "module":
        if isinstance_plain(first, dict) and len(objects) > 1:
            return _module_global(writer, name or "?", first, objects)
        writer.start(f"the module `{name}`", "module global", first)
    elif root == "frame":
        return _frame(writer, objects, 0, thread)
    elif root == "exception":
        where = thread_words(thread)
        writer.start(f"the exception being handled{where} (`{type_name(first)}`)", "exception", first)
    elif root == "context":
        return _context(writer, objects, 0)
    else:
        writer.start(root, "object", first)
    return 0


def _module_global(writer: _Writer, module: str, globals_: dict[str, Any], objects: list[Any]) -> int:
    held = objects[1]
    keys = [key for key, value in items_of(globals_) if value is held and type(key) is str]
    shown = [key for key in keys if not key.startswith("_")] or keys
    key = shown[0] if shown else "?"
    if module == "sys" and key in _LAST:
        names = " and ".join(f"`sys.{key}`" for key in keys[:3])
        writer.start(names if len(keys) > 1 else f"`sys.{key}`", "last traceback", held)
    elif module == "builtins" and key == "_":
        writer.start("`_`, the value that the prompt showed last", "prompt", held, grows=True)
    elif module == "__main__" and "_oh" in globals_ and _is_prompt_name(keys):
        # `Out` and the names with underscores are IPython's; others are the user's own.
        own = [key for key in keys if not _is_prompt_name([key])]
        if own:
            writer.start(f"global `{own[0]}`", "module global", held, grows=True)
        elif held is globals_.get("_oh"):
            writer.start("`Out`, what IPython has shown", "prompt", held, grows=True)
        else:
            names = " and ".join(f"`{key}`" for key in sorted(keys, key=len)[:3])
            writer.start(f"{names}, what IPython has shown", "prompt", held, grows=True)
    elif module == "gc" and key == "garbage":
        writer.start("`gc.garbage`, where gc.DEBUG_SAVEALL keeps it", "garbage", held)
    else:
        where = "" if module == "__main__" else f" of module `{module}`"
        also = f", also `{shown[1]}`" if len(shown) > 1 else ""
        writer.start(f"global `{key}`{where}{also}", "module global", held, grows=True)
        if isinstance_plain(held, dict, list, set, collections.deque) and len(objects) > 2:
            writer.steps[-1]["kind"] = "registry"
    return 1


def _is_prompt_name(keys: list[str]) -> bool:
    return any(key in ("Out", "_oh") or (key.startswith("_") and key.strip("_0123456789") == "") for key in keys)


def _frame(
    writer: _Writer, objects: list[Any], at: int, thread: int | None, line: int | None = None
) -> int:
    """Words for a frame and the variable in it; its traceback knows the line of an error better."""
    frame, held = objects[at], objects[at + 1]
    if type(held) is types.FrameType:  # the caller's, by `f_back`
        return at + 1
    code = frame.f_code
    where = place(code.co_filename, line or frame.f_lineno)
    function = code.co_name
    names = [name for name, value in heap_frame_variables(frame) if value is held and name is not None]
    more: dict[str, Any] = {"file": code.co_filename, "line": line or frame.f_lineno, "function": function}
    kind, who = "variable", ""
    if thread is not None:
        who = thread_words(thread)
        kind = "thread" if who else "variable"
    scope = f"in `{function}` ({where}{who})" if function != "<module>" else f"in the module's code ({where}{who})"
    if names:
        writer.start(f"variable `{names[0]}` {scope}", kind, held, grows=True, **more)
        if type(held) is types.CellType and at + 2 < len(objects):
            writer.steps[-1]["type"] = type_name(objects[at + 2])
            return at + 2
        return at + 1
    if type(held) is dict and at + 2 < len(objects):  # the names of code that is not a function's
        target = objects[at + 2]
        keys = [key for key, value in items_of(held) if value is target and type(key) is str]
        if keys and function == "<module>":  # a script's, or a prompt's, that is no module
            of = "" if code.co_filename.startswith("<") else f" of {os.path.basename(code.co_filename)}"
            writer.start(f"global `{keys[0]}`{of}{who}", "module global", target, grows=True, **more)
            return at + 2
        if keys:
            writer.start(f"variable `{keys[0]}` {scope}", kind, target, grows=True, **more)
            return at + 2
    if type(held) is types.FunctionType:
        writer.start(f"the function {function_words(held)}, which runs{who}", kind, held, **more)
        return at + 1
    writer.start(f"{_IN_PROGRESS} {scope}", kind, held, **more)
    return at + 1


def _context(writer: _Writer, objects: list[Any], at: int) -> int:
    """A context of contextvars: its tree has no names, so look for the variable by its value."""
    context = objects[at]
    while at + 1 < len(objects) and short_name(objects[at + 1]).startswith("hamt"):
        at += 1
    held = objects[at + 1] if at + 1 < len(objects) else None
    for variable, value in contextvars.Context.items(context):
        if value is held:
            name = contextvars.ContextVar.__dict__["name"].__get__(variable)
            writer.start(f"context variable `{name}`", "context variable", held, grows=True)
            return at + 1
    writer.start("a context of contextvars", "context variable", context)
    return at


def _edge(writer: _Writer, objects: list[Any], at: int) -> int:
    """Words for the edge from one object to the next; returns the position they lead to."""
    holder, held = objects[at], objects[at + 1]
    kind = type(holder)
    handler = _BY_TYPE.get(kind)
    if handler is not None:
        end: int = handler(writer, objects, at)
        return end
    if isinstance_plain(holder, BaseException):
        return _exception(writer, objects, at)
    if isinstance_plain(holder, dict):
        # A subclass may have attributes too.
        if held is instance_dict(holder):
            return _attribute(writer, objects, at)
        found = _item(writer, holder, held)
        return at + 1 if found else _instance(writer, objects, at)
    if isinstance_plain(holder, type):
        return _class(writer, objects, at)
    if isinstance_plain(holder, threading.local):
        return _thread_local(writer, objects, at)
    if isinstance_plain(holder, list) and _index(writer, list.__iter__(holder), held):
        return at + 1
    if isinstance_plain(holder, tuple) and _tuple_field(writer, holder, held):
        return at + 1
    if isinstance_plain(holder, collections.deque) and _index(
        writer, collections.deque.__iter__(holder), held
    ):
        return at + 1
    return _instance(writer, objects, at)


def _index(writer: _Writer, values: Iterator[Any], held: object) -> bool:
    for index, value in enumerate(values):
        if value is held:
            writer.suffix(f"[{index}]", held)
            return True
        if index >= _MAX_ITEMS:
            break
    return False


def _tuple_field(writer: _Writer, holder: tuple[Any, ...], held: object) -> bool:
    for index, value in enumerate(tuple.__iter__(holder)):
        if value is held:
            fields: Any = namespace(type(holder)).get("_fields")
            named = type(fields) is tuple and index < len(fields) and type(fields[index]) is str
            writer.suffix(f".{fields[index]}" if named else f"[{index}]", held, stays=True)
            return True
    return False


def _item(writer: _Writer, holder: dict[Any, Any], held: object) -> bool:
    for key, value in items_of(holder):
        if value is held:
            writer.suffix(f"[{key_words(key)}]", held)
            return True
        if key is held:
            writer.start("a key of that dict", "object", held)
            return True
    return False


def _list(writer: _Writer, objects: list[Any], at: int) -> int:
    if not _index(writer, iter(objects[at]), objects[at + 1]):
        writer.start(f"a `{type_name(objects[at])}`", "object", objects[at + 1])
    return at + 1


def _deque(writer: _Writer, objects: list[Any], at: int) -> int:
    return _list(writer, objects, at)


def _dict(writer: _Writer, objects: list[Any], at: int) -> int:
    if not _item(writer, objects[at], objects[at + 1]):
        writer.start("a dict", "object", objects[at + 1])
    return at + 1


def _set(writer: _Writer, objects: list[Any], at: int) -> int:
    writer.suffix("{…}", objects[at + 1])
    return at + 1


def _cell(writer: _Writer, objects: list[Any], at: int) -> int:
    if not writer.steps:
        writer.start("a closure's cell", "closure", objects[at + 1])
    return at + 1


def _function(writer: _Writer, objects: list[Any], at: int) -> int:
    function: Any = objects[at]
    held: Any = objects[at + 1]
    after = objects[at + 2] if at + 2 < len(objects) else None
    words, code = function_words(function), function.__code__
    if held is function.__closure__ and after is not None:
        index = next((i for i, cell in enumerate(held) if cell is after), None)
        name = code.co_freevars[index] if index is not None and index < len(code.co_freevars) else "?"
        end = objects[min(at + 3, len(objects) - 1)]
        writer.start(f"closure cell `{name}` of function {words}", "closure", end, grows=True)
        return min(at + 3, len(objects) - 1)
    if held is function.__defaults__ and after is not None:
        index = next((i for i, value in enumerate(held) if value is after), 0)
        name = code.co_varnames[code.co_argcount - len(held) + index]
        writer.start(f"default argument `{name}` of function {words}", "default argument", after, grows=True)
        return at + 2
    if held is function.__kwdefaults__ and after is not None:
        name = next((key for key, value in items_of(held) if value is after), "?")
        writer.start(f"default argument `{name}` of function {words}", "default argument", after, grows=True)
        return at + 2
    if held is instance_dict(function):
        return _attribute(writer, objects, at)
    if type(held) is dict and held is function.__globals__ and after is not None:
        name = next((key for key, value in items_of(held) if value is after), "?")
        writer.start(f"global `{name}` of function {words}", "module global", after, grows=True)
        return at + 2
    writer.start(f"function {words}", "object", held)
    return at + 1


def _method(writer: _Writer, objects: list[Any], at: int) -> int:
    method, held = objects[at], objects[at + 1]
    function = method.__func__
    name = getattr(function, "__qualname__", "?") if type(function) is types.FunctionType else "?"
    if held is method.__self__:
        writer.start(f"the object that method `{name}` is bound to", "object", held)
    return at + 1


def _builtin(writer: _Writer, objects: list[Any], at: int) -> int:
    function, held = objects[at], objects[at + 1]
    if held is function.__self__:
        writer.start(f"the object that method `{function.__name__}` is bound to", "object", held)
    return at + 1


def _partial(writer: _Writer, objects: list[Any], at: int) -> int:
    partial, held = objects[at], objects[at + 1]
    func = functools.partial.__dict__["func"].__get__(partial)
    words = f"functools.partial of {function_words(func)}" if type(func) is types.FunctionType else "functools.partial"
    after = objects[at + 2] if at + 2 < len(objects) else None
    if isinstance_plain(held, tuple) and after is not None:
        index = next((i for i, value in enumerate(held) if value is after), 0)
        writer.start(f"argument {index} of a {words}", "partial", after)
        return at + 2
    if isinstance_plain(held, dict) and after is not None:
        name = next((key for key, value in items_of(held) if value is after), "?")
        writer.start(f"argument `{name}` of a {words}", "partial", after)
        return at + 2
    writer.start(f"a {words}", "partial", held)
    return at + 1


def _lru_cache(writer: _Writer, objects: list[Any], at: int) -> int:
    wrapper, held = objects[at], objects[at + 1]
    function = next((x for x in gc.get_referents(wrapper) if type(x) is types.FunctionType), None)
    name = function.__qualname__ if function is not None else "?"
    if held is function or held is instance_dict(wrapper):
        if held is function:
            return at + 1
        return _attribute(writer, objects, at)
    writer.start(f"the lru_cache of function `{name}`", "lru_cache", held)
    # What it keeps lies in a dict, and arguments in tuples.
    while at + 2 < len(objects) and type(objects[at + 1]) in (dict, tuple, _LRU_CACHE, list):
        at += 1
    at += 1
    if at < len(objects) - 1 and short_name(objects[at]) == "_HashedSeq":
        at += 1
    writer.steps[-1]["type"] = type_name(objects[at])
    return at


def _generator(writer: _Writer, objects: list[Any], at: int) -> int:
    generator, held = objects[at], objects[at + 1]
    names = [name for name, value in heap_frame_variables(generator) if value is held and name]
    code = next(
        getattr(generator, name)
        for name in ("gi_code", "cr_code", "ag_code")
        if hasattr(type(generator), name)
    )
    what = {types.GeneratorType: "generator", types.CoroutineType: "coroutine"}.get(
        type(generator), "async generator"
    )
    where = place(code.co_filename, code.co_firstlineno)
    name = f"local `{names[0]}`" if names else "a value"
    writer.start(f"{name} of the suspended {what} `{code.co_name}` ({where})", "generator", held, grows=True)
    if type(held) is types.CellType and at + 2 < len(objects):
        return at + 2
    return at + 1


def _traceback(writer: _Writer, objects: list[Any], at: int) -> int:
    held = objects[at + 1]
    if not writer.steps or writer.steps[-1]["type"] != "traceback":
        writer.start("a traceback", "exception", objects[at])
    if type(held) is types.FrameType and at + 2 < len(objects):
        return _frame(writer, objects, at + 1, None, objects[at].tb_lineno)
    writer.steps[-1]["type"] = "traceback"
    return at + 1


def _frame_edge(writer: _Writer, objects: list[Any], at: int) -> int:
    frame, held = objects[at], objects[at + 1]
    if type(held) is types.FrameType or held is frame.f_trace:
        return at + 1
    return _frame(writer, objects, at, None)


def _exception(writer: _Writer, objects: list[Any], at: int) -> int:
    exception: Any = objects[at]
    held: Any = objects[at + 1]

    def get(name: str) -> Any:
        return BaseException.__dict__[name].__get__(exception)

    name = type_name(exception)
    if not writer.steps:
        writer.start(f"a `{name}`", "exception", exception)
    if writer.steps[-1]["kind"] not in ("exception", "last traceback") and f"`{name}`" not in writer.steps[-1]["text"]:
        writer.steps[-1]["text"] += f" (`{name}`)"
    if held is get("__traceback__"):
        writer.start("its traceback", "exception", held)
    elif held is get("__context__"):
        writer.start(f"its __context__, the `{type_name(held)}` it was raised after", "exception", held)
    elif held is get("__cause__"):
        writer.start(f"its __cause__, the `{type_name(held)}` it was raised from", "exception", held)
    elif isinstance_plain(exception, BaseExceptionGroup) and type(held) is tuple and at + 2 < len(objects):
        after = objects[at + 2]
        index = next((i for i, value in enumerate(held) if value is after), 0)
        what = "exception" if isinstance_plain(after, BaseException) else "argument"
        writer.start(f"its {what} {index}, a `{type_name(after)}`", "exception", after)
        return at + 2
    elif held is get("args") and at + 2 < len(objects):
        after = objects[at + 2]
        index = next((i for i, value in enumerate(held) if value is after), 0)
        writer.start(f"its argument {index}", "exception", after)
        return at + 2
    elif held is instance_dict(exception) and at + 2 < len(objects):
        after = objects[at + 2]
        name = next((key for key, value in items_of(held or {}) if value is after), "?")
        writer.start(f"its attribute `{name}`", "exception", after, grows=True)
        return at + 2
    else:
        writer.start("a part of it", "exception", held)
    return at + 1


def _class(writer: _Writer, objects: list[Any], at: int) -> int:
    cls, held = objects[at], objects[at + 1]
    if isinstance_plain(held, dict) and at + 2 < len(objects):
        after = objects[at + 2]
        for key, value in items_of(held):
            if value is after:
                if cls is weakref.finalize and key == "_registry":
                    return _finalizer(writer, objects, at + 2)
                writer.start(f"class attribute `{class_name(cls)}.{key}`", "class attribute", after, grows=True)
                return at + 2
    writer.start(f"class `{class_name(cls)}`", "object", held)
    return at + 1


def _finalizer(writer: _Writer, objects: list[Any], at: int) -> int:
    """At the table of all finalizers: a dict from finalizers to what they call."""
    info = objects[at + 1] if at + 1 < len(objects) else None
    function: Any = None
    if info is not None and short_name(info) == "_Info":
        function = next((x for x in gc.get_referents(info) if callable(x) and not isinstance_plain(x, type)), None)
    what = f" of {function_words(function)}" if type(function) is types.FunctionType else ""
    writer.steps.clear()
    end = min(at + 3, len(objects) - 1)
    writer.start(f"an argument{what} given to weakref.finalize", "finalizer", objects[end])
    return end


def _thread_local(writer: _Writer, objects: list[Any], at: int) -> int:
    # The object has a dict of dicts, one a thread.
    end = at + 1
    while end < len(objects) - 1 and type(objects[end]) is dict:
        end += 1
    after = objects[end]
    holder = objects[end - 1]
    name = "?"
    if type(holder) is dict:
        name = next((key for key, value in items_of(holder) if value is after), "?")
    before = writer.steps[-1]["text"] if writer.steps else "a threading.local"
    if writer.steps and writer.grows:
        writer.suffix(f".{name}", after)
        writer.steps[-1]["kind"] = "thread local"
        writer.cure = None
        writer.steps[-1]["text"] = f"thread-local {writer.steps[-1]['text']}"
    else:
        writer.start(f"thread-local `{name}` of {before}", "thread local", after, grows=True)
    return end


def _attribute(writer: _Writer, objects: list[Any], at: int) -> int:
    """From an object over its dict to what is in it."""
    owner, attributes = objects[at], objects[at + 1]
    if at + 2 >= len(objects):
        writer.suffix(".__dict__", attributes)
        return at + 1
    held = objects[at + 2]
    name = next((key for key, value in items_of(attributes) if value is held and type(key) is str), "?")
    return _named(writer, objects, owner, name, at + 2)


def _named(writer: _Writer, objects: list[Any], owner: object, name: str, at: int) -> int:
    """`owner.name` is at this position."""
    held = objects[at]
    after = objects[at + 1] if at + 1 < len(objects) else None
    if name in _PARTS and isinstance_plain(held, dict) and after is not None:
        key = next((key for key, value in items_of(held) if value is after), "?")
        numbered = type(key) is str and key.isdigit()
        writer.suffix(f"[{key}]" if numbered else f".{key}", after, "module attribute")
        return at + 1
    if name in _HOOKS and isinstance_plain(held, dict) and after is not None:
        key = next((key for key, value in items_of(held) if value is after), "?")
        if not writer.steps:
            writer.start(f"a `{type_name(owner)}`", "object", owner)
        writer.start(f"its hook `{name}[{key_words(key)}]`", "hook", after)
        return at + 1
    if isinstance_plain(owner, queue.Queue) and name == "queue" and after is not None:
        return _queue(writer, held, after, at)
    optimizer = _is_optimizer(owner)
    if optimizer and name == "state" and isinstance_plain(held, dict):
        return _optimizer_state(writer, objects, owner, at)
    if optimizer and name == "param_groups":
        return _optimizer_group(writer, objects, at)
    if isinstance_plain(owner, logging.LogRecord):
        if not writer.steps:
            writer.start("a logging record", "logging", owner)
        else:
            writer.steps[-1]["kind"] = "logging"
        writer.start(f"its `{name}`, in a logging record", "logging", held, grows=True)
        return at
    if "Future" in short_name(owner) and name in ("_result", "_exception"):
        if not writer.steps:
            writer.start(f"a `{type_name(owner)}`", "future", owner)
        writer.start(f"its {name.lstrip('_')}, in a future", "future", held)
        return at
    writer.suffix(f".{name}", held)
    return at


def _queue(writer: _Writer, items: Any, held: object, at: int) -> int:
    """From a queue's deque or list to an item."""
    index = next((i for i, value in enumerate(items) if value is held), 0)
    if not writer.steps:
        writer.start("a queue.Queue", "queue", items)
    writer.start(f"item {index} of that queue", "queue", held)
    return at + 1


def _is_optimizer(value: object) -> bool:
    modules = [_of_type("__module__", cls) for cls in mro(value)]
    return any(type(module) is str and module == "torch.optim.optimizer" for module in modules)


def _optimizer_state(writer: _Writer, objects: list[Any], optimizer: object, at: int) -> int:
    state = objects[at]
    if at + 1 >= len(objects):
        return at
    if not writer.steps:
        writer.start(f"a `{type_name(optimizer)}`", "optimizer", optimizer)
    held = objects[at + 1]
    for key, value in items_of(state):
        if key is held:
            writer.start("a key of the optimizer's state", "optimizer", held)
            return at + 1
        if value is held:
            which = _parameter_number(optimizer, key)
            if at + 2 < len(objects) and isinstance_plain(held, dict):
                after = objects[at + 2]
                name = next((name for name, value in items_of(held) if value is after), "?")
                writer.start(f"optimizer state `{name}` of {which}", "optimizer", after)
                return at + 2
            writer.start(f"optimizer state of {which}", "optimizer", held)
            return at + 1
    return at


def _optimizer_group(writer: _Writer, objects: list[Any], at: int) -> int:
    groups = objects[at]
    if at + 3 >= len(objects) or not isinstance_plain(groups, list):
        return at
    group, params = objects[at + 1], objects[at + 2]
    number = next((i for i, value in enumerate(groups) if value is group), 0)
    target = objects[at + 3]
    if isinstance_plain(params, list):
        index = next((i for i, value in enumerate(params) if value is target), 0)
        if not writer.steps:
            writer.start("an optimizer", "optimizer", groups)
        writer.start(f"parameter {index} of the optimizer's group {number}", "optimizer", target)
        return at + 3
    return at


def _parameter_number(optimizer: object, parameter: object) -> str:
    groups = attributes_of(optimizer).get("param_groups")
    if type(groups) is list:
        for number, group in enumerate(groups):
            params = group.get("params") if type(group) is dict else None
            if type(params) is list:
                for index, value in enumerate(params):
                    if value is parameter:
                        return f"parameter {index} of group {number}"
    return "a parameter it no longer has"


def _instance(writer: _Writer, objects: list[Any], at: int) -> int:
    """From any other object: by its dict, its values, or its slots."""
    owner, held = objects[at], objects[at + 1]
    if isinstance_plain(held, dict) and held is instance_dict(owner):
        return _attribute(writer, objects, at)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance_plain(owner, torch._C.TensorBase):
        if _tensor(writer, objects, at, torch):
            return min(at + (2 if isinstance_plain(held, dict) else 1), len(objects) - 1)
    for name, value in heap_instance_values(owner) or ():
        if value is held:
            return _named(writer, objects, owner, name, at + 1)
    # Where CPython's layout is not known, this makes the dict.
    for name, value in items_of(instance_dict(owner) or {}):
        if value is held and type(name) is str:
            return _named(writer, objects, owner, name, at + 1)
    for cls in mro(owner):
        for name, member in namespace(cls).items():
            if type(member) is types.MemberDescriptorType:
                try:
                    value = member.__get__(owner)
                except AttributeError:
                    continue
                if value is held:
                    return _named(writer, objects, owner, name, at + 1)
    name = type_name(owner)
    if type(held) in _SUSPENDED and "Task" in short_name(owner) and writer.steps:
        return at + 1  # the coroutine's own words tell it
    if "Future" in short_name(owner):
        writer.start(f"the result or callbacks of a `{name}`", "future", held)
    elif name == "numpy.ndarray":
        if writer.steps:
            writer.start("the memory it shares", "array", held)
        else:
            writer.start("a NumPy array", "array", held)
    elif isinstance_plain(owner, queue.SimpleQueue):
        in_list = type(held) is list and at + 2 < len(objects)
        at += in_list
        writer.start(f"an item of that `{name}`", "queue", objects[at + 1])
    elif not writer.steps:
        writer.start(f"a `{name}`", "object", held)
    elif "iterator" in name or name in ("zip", "map", "enumerate", "reversed", "filter"):
        writer.start(f"what the `{name}` goes through", "object", held)
    else:
        writer.start(f"held by a `{name}`", "object", held)
    return at + 1


def _tensor(writer: _Writer, objects: list[Any], at: int, torch: Any) -> bool:
    """What PyTorch's own types refer to from C++."""
    owner, held = objects[at], objects[at + 1]
    after = objects[at + 2] if at + 2 < len(objects) else None
    if isinstance_plain(held, torch._C._FunctionBase):
        names = re.findall("`[^`]*`", writer.steps[-1]["text"]) if writer.steps else []
        whose = f" of {names[0]}" if names else ""
        writer.start(f"the autograd graph{whose}, kept by {short_name(held)}", "autograd", held)
        return True
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(torch._C.TensorBase, name).__get__(owner)
        if held is hooks and after is not None:
            key = next((key for key, value in items_of(held) if value is after), "?")
            writer.start(f"its hook `{name}[{key_words(key)}]`", "hook", after)
            return True
    return False


def _skip(writer: _Writer, objects: list[Any], at: int) -> int:
    return at + 1


def _weakref(writer: _Writer, objects: list[Any], at: int) -> int:
    writer.start("the callback of a weak reference", "object", objects[at + 1])
    return at + 1


def _tuple(writer: _Writer, objects: list[Any], at: int) -> int:
    _tuple_field(writer, objects[at], objects[at + 1])
    return at + 1


_SUSPENDED = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
_BY_TYPE: dict[type, Any] = {
    dict: _dict,
    list: _list,
    tuple: _tuple,
    set: _set,
    frozenset: _set,
    collections.deque: _deque,
    types.CellType: _cell,
    types.FunctionType: _function,
    types.MethodType: _method,
    types.BuiltinMethodType: _builtin,
    types.FrameType: _frame_edge,
    types.TracebackType: _traceback,
    types.GeneratorType: _generator,
    types.CoroutineType: _generator,
    types.AsyncGeneratorType: _generator,
    functools.partial: _partial,
    _LRU_CACHE: _lru_cache,
    contextvars.Context: _context,
    staticmethod: _skip,
    classmethod: _skip,
    property: _skip,
    types.MappingProxyType: _skip,
    weakref.ref: _weakref,
    _thread._local: _thread_local,
}


# Cycles


class Ring(NamedTuple):
    """A cycle of objects that nothing but themselves holds."""

    words: str
    collectable: bool
    objects: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"words": self.words, "collectable": self.collectable, "objects": list(self.objects)}


def _importance(value: object) -> int:
    """From what a cycle is told: an object of the program's own, or a function, rather than a dict."""
    is_own = _of_type("__flags__", type(value)) & (1 << 9)  # a class made by `class`
    if is_own and not isinstance_plain(value, dict):
        return 0
    return 1 if type(value) is types.FunctionType else 2


def _ring_names(cycle: list[Any]) -> list[str]:
    """The objects of a cycle, each with the name under which it has the next."""
    names = []
    at = 0
    while at < len(cycle) - 1:
        writer = _Writer()
        owner = cycle[at]
        writer.start("", "object", owner)
        at = _edge(writer, cycle, at)
        steps = [step["text"] for step in writer.steps if step["text"]]
        name = type_name(owner)
        if isinstance_plain(owner, types.FunctionType):
            name = f"function `{owner.__qualname__}`"
            if steps and " of function `" in steps[0]:
                name = steps.pop(0)
        elif steps and steps[0].startswith("`") and steps[0].endswith("`"):
            # `next` of a Node: Node.next
            inner = steps.pop(0)[1:-1]
            name += inner if inner.startswith(("[", "{")) else f".{inner}"
        names.append(" → ".join([name, *steps]))
    return names


def describe_cycle(heap: Heap, cycle: list[Any], way: list[Any], natives: list[Any]) -> Ring:
    """Words for a cycle, and whether Python's collector can free it."""
    start = min(range(len(cycle) - 1), key=lambda at: (_importance(cycle[at]), at))
    cycle = [*cycle[start:-1], *cycle[: start + 1]]
    try:
        names = _ring_names(cycle)
    except Exception:  # as in `describe`
        names = [type_name(value) for value in cycle[:-1]]
    first = type_name(cycle[0])
    if type(cycle[0]) is types.FunctionType:
        first = f"function `{cycle[0].__qualname__}`"
    names = [plain(name) for name in names]
    if len(names) > 2 * _LONG:
        names[_LONG:-_LONG] = [f"… {len(names) - 2 * _LONG} objects …"]
    words = " → ".join([*names, plain(first)])
    frozen = any(heap.is_frozen(member) for member in [*cycle, *way])
    if frozen:
        verdict = "frozen by gc.freeze(), so gc cannot free it until gc.unfreeze()"
    elif natives:
        verdict = "something outside Python refers to it, so gc cannot free it"
    else:
        verdict = "gc.collect() frees it"
    return Ring(f"{words}; {verdict}", not frozen and not natives, tuple(names))
