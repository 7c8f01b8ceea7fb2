"""Python runs this before the program that ``python -m lastref.torch`` starts.

Python imports a module of this name at its start. The folder it lies in was put in front of PYTHONPATH by
``lastref/torch/__main__.py``; the first thing done here is to undo that, so that the program, and the processes
that it starts, find all as it would be without. Then the machine's own module of this name runs, if it has
one. What is left is a finder that waits for the program to import torch: nothing of torch or lastref is
imported before, since programs set variables for torch first.
"""

import importlib
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "LASTREF_TORCH_RUN"


class AfterTorch:
    """Finds torch as anyone else would, and calls `lastref.torch._run.start` once it is imported."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.start()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def start(self) -> None:
        if importlib.util.find_spec("lastref") is None:
            # `python -m` looks in the current folder, a program does not.
            sys.path.append(self.settings["package"])
        from lastref.torch import _run

        _run.start(self.settings)


def undo(settings: dict[str, Any]) -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    if settings["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = settings["pythonpath"]
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.path_importer_cache.pop(here, None)
    # The machine's own module of this name, for which this one stood in.
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


if VARIABLE in os.environ:
    settings = json.loads(os.environ.pop(VARIABLE))
    undo(settings)
    sys.meta_path.insert(0, AfterTorch(settings))
