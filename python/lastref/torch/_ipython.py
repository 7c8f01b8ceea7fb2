"""``%load_ext lastref.torch`` in IPython and notebooks: the magic ``%gpu_memory``."""

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

USAGE = "%gpu_memory [top=N] [device=N] [json | html]"


def load_ipython_extension(ipython: "InteractiveShell") -> None:
    """What ``%load_ext lastref.torch`` calls."""
    from . import _report  # noqa: F401  what the report needs, while there is memory

    def gpu_memory(line: str) -> None:
        """Who holds the GPU's memory: the largest storages, and every path from a variable to them.

        %gpu_memory [top=N] [device=N] [json | html]

        top     how many storages are shown; 20 at first
        device  the index of a device; all at first
        json    as JSON; html: as a page, with the graph
        """
        arguments, form = parse(line)
        from ._report import report

        made = report(**arguments)
        if form == "html":
            from IPython.display import HTML, display

            display(HTML(made.to_html()))  # type: ignore[no-untyped-call]
        else:
            print(made.to_json() if form == "json" else made.text().rstrip())

    # What adds a magic is a method made by a decorator, whose type is wrong.
    add: Any = ipython.register_magic_function
    add(gpu_memory, "line", "gpu_memory")


def unload_ipython_extension(ipython: "InteractiveShell") -> None:
    """What ``%unload_ext lastref.torch`` calls."""
    ipython.magics_manager.magics["line"].pop("gpu_memory", None)


def parse(line: str) -> tuple[dict[str, Any], str]:
    """The arguments of `report`, and the form: ``"text"``, ``"json"`` or ``"html"``."""
    from IPython.core.error import UsageError

    arguments: dict[str, Any] = {}
    form = "text"
    for word in shlex.split(line):
        name, equals, value = word.partition("=")
        if name in ("top", "device") and value.isdecimal():
            arguments[name] = int(value)
        elif name in ("json", "html") and not equals:
            form = name
        else:
            raise UsageError(f"%gpu_memory: {word!r} is not understood. Usage: {USAGE}")
    return arguments, form
