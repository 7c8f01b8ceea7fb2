"""Builds the harness over PyTorch's allocator: ``python build.py FOLDER``, with a Python that has torch.

FOLDER gets the stand-in for CUDA's libraries too. Needs a C and a C++ compiler.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
STANDIN = HERE.parent.parent / "python/tests/torch/standin"
SOURCE = HERE / "alloc.cpp"
PROGRAM = "torch_alloc"

sys.path.insert(0, str(STANDIN))
import build as standin  # noqa: E402  (the stand-in's own)


def harness(folder: Path) -> Path:
    """Builds the program, and returns its path."""
    made = standin.build(folder) / PROGRAM
    torch = Path(importlib.util.find_spec("torch").origin).resolve().parent
    cuda = standin.cuda_include().parent
    runtime = next((cuda / "lib").glob("libcudart.so.*"))
    # Each time, since the torch may be another one.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        new = Path(scratch) / PROGRAM
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        includes = [f"-I{folder}" for folder in (torch / "include", cuda / "include", STANDIN)]
        # The stand-in first, so that its functions are found before CUDA's.
        libraries = [f"-L{folder}", f"-l:{standin.LIBRARIES['cudart.c']}", f"-L{torch}/lib", "-lc10_cuda", "-lc10"]
        paths = f"-Wl,-rpath,$ORIGIN:{torch}/lib:{runtime.parent}"
        subprocess.run(
            [*compiler, "-O2", "-std=c++20", *includes, str(SOURCE), "-o", str(new), *libraries, str(runtime)]
            + [paths, "-pthread"],
            check=True,
        )
        os.replace(new, made)
    return made


if __name__ == "__main__":
    print(harness(Path(sys.argv[1]).resolve()))
