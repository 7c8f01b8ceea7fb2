"""Builds the stand-in: ``python build.py FOLDER``, with a Python that has torch. Needs a C compiler."""

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {
    "cudart.c": "liblastref_standin_cudart.so",
    "cuda.c": "libcuda.so.1",
    "nvml.c": "libnvidia-ml.so.1",
}


def cuda_include() -> Path:
    """The folder of CUDA's headers that torch's packages brought."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("build.py: torch is not installed here")
    site = Path(spec.origin).resolve().parent.parent
    for folder in sorted(site.glob("nvidia/cu[0-9]*/include"), reverse=True):
        if (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise SystemExit(f"build.py: no CUDA headers beside torch in {site}")


def build(folder: Path) -> Path:
    """Builds what is missing or older than its source, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, library in LIBRARIES.items():
        made = folder / library
        if made.exists() and made.stat().st_mtime >= (HERE / source).stat().st_mtime:
            continue
        # Others may build at the same time, or run with the one before.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            new = Path(scratch) / library
            compiler = shlex.split(os.environ.get("CC", "cc"))
            flags = ["-O2", "-fPIC", "-shared", "-w", f"-Wl,-soname,{library}", f"-I{cuda_include()}"]
            command = [*compiler, *flags, "-o", str(new), str(HERE / source), "-lpthread", "-ldl"]
            subprocess.run(command, check=True)
            os.replace(new, made)
    return folder


def environment(folder: Path, mib: int, devices: int = 1) -> dict[str, str]:
    """Variables under which a program finds the stand-in's devices."""
    return {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / LIBRARIES["cudart.c"]),
        "LASTREF_STANDIN_MIB": str(mib),
        "LASTREF_STANDIN_DEVICES": str(devices),
    }


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
