"""Finds, or compiles, the C++ shim for the torch that is installed.

The shim is a subclass of a class of PyTorch's whose layout changes between versions, so there is one
shared library for each build of torch. It is looked for among those that the package brings, then in the
cache (``~/.cache/lastref/shim``, or ``shim`` under the folder that ``LASTREF_CACHE`` names), and else
compiled, which takes some seconds, with the headers that torch and its CUDA packages bring. ``CXX`` names the
compiler; ``LASTREF_TORCH_SHIM=off`` does without a shim.

1. A library in the cache is whole: it is written under another name, and renamed.
2. Two processes do not compile the same at once: the second waits for the first one's lock.
3. Nothing is loaded from a folder that others may write to.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The versions of torch, major and minor, whose allocator class the shim knows. The source says the same.
KNOWN_VERSIONS = ((2, 13), (2, 14), (2, 15))

SOURCE = Path(__file__).with_name("_shim") / "lastref_torch.cpp"
COMPILE_SECONDS = 600


class Unavailable(Exception):
    """There is no shim for this torch here. The text says what is missing and how to get it."""


def version_of(torch: Any) -> tuple[int, int]:
    """Major and minor version."""
    major, minor = str(torch.__version__).split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def check(torch: Any) -> None:
    """Raises `Unavailable` if this torch is of no kind that the shim can wrap."""
    if torch.version.cuda is None:
        raise Unavailable(f"this build of torch ({torch.__version__}) has no CUDA allocator to guard")
    version = version_of(torch)
    if version not in KNOWN_VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN_VERSIONS)
        newer = "a newer lastref" if version > KNOWN_VERSIONS[-1] else "a newer torch"
        raise Unavailable(
            f"torch {torch.__version__} is of a version whose allocator this lastref does not know: "
            f"it knows {known}. Install one of these, or {newer}"
        )


def load(torch: Any) -> ctypes.CDLL:
    """The shim's library, compiled first if need be.

    Raises:
        Unavailable: there is none, and none can be made.
    """
    if os.environ.get("LASTREF_TORCH_SHIM", "").lower() in ("0", "off", "no"):
        raise Unavailable(
            "the environment variable LASTREF_TORCH_SHIM switches the shim off: unset it"
        )
    check(torch)
    library = ctypes.CDLL(str(_find_or_compile(torch)))
    library.lastref_torch_install.argtypes = [ctypes.c_size_t] * 4
    library.lastref_torch_install.restype = ctypes.c_char_p
    library.lastref_torch_uninstall.restype = ctypes.c_int
    library.lastref_torch_counters.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
    library.lastref_torch_counters.restype = None
    return library


def _find_or_compile(torch: Any) -> Path:
    name = f"lastref_torch-{_key(torch)}.so"
    shipped = SOURCE.with_name(name)
    if shipped.is_file():
        return shipped
    folder = _cache()
    library = folder / name
    if not _is_whole(library):
        with _locked(folder / (name + ".lock")):
            if not _is_whole(library):
                compile_library(torch, SOURCE, library)
    _check_owner(library)
    return library


def _is_whole(library: Path) -> bool:
    """Whether it is there, and not cut off, by a crash of the machine: loading half of it would end the process."""
    try:
        with open(library, "rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    # In ELF of 64 bits: where the table of sections begins, which comes last, and the size and number of its entries.
    start, each, count = (int.from_bytes(header[at : at + n], sys.byteorder) for at, n in ((40, 8), (58, 2), (60, 2)))
    return header[:4] == b"\x7fELF" and len(header) == 64 and start + each * count <= size


def _key(torch: Any) -> str:
    """One for each build of torch and each version of the source."""
    parts = (
        torch.__version__,
        torch.version.git_version,
        str(torch._C._GLIBCXX_USE_CXX11_ABI),
        os.uname().machine,
    )
    digest = hashlib.sha256("\n".join(parts).encode() + SOURCE.read_bytes()).hexdigest()
    return f"{torch.__version__.split('+')[0]}-{digest[:16]}"


def _cache() -> Path:
    named = os.environ.get("LASTREF_CACHE")
    candidates = [Path(named)] if named else []
    with contextlib.suppress(RuntimeError):
        candidates.append(Path.home() / ".cache" / "lastref")
    candidates.append(Path(tempfile.gettempdir()) / f"lastref-{os.getuid()}")
    problem: OSError | None = None
    for candidate in candidates:
        folder = candidate / "shim"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            if os.access(folder, os.W_OK):
                return folder
        except (OSError, Unavailable) as error:
            problem = error if isinstance(error, OSError) else problem
    raise Unavailable(
        "there is no folder to keep the compiled shim in"
        f" ({problem or 'none may be written to'}): name one with LASTREF_CACHE"
    )


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0) or stat.S_IMODE(status.st_mode) & 0o002:
        raise Unavailable(
            f"{path} belongs to somebody else or may be written by anyone, and is not loaded: "
            "delete it, or name another folder with LASTREF_CACHE"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Closed, the file lets go of the lock, also when the process dies.
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_library(torch: Any, source: Path, library: Path) -> None:
    """Compiles C++ against this torch. The library is then there as a whole, or `Unavailable` is raised."""
    compiler = _compiler()
    root = Path(torch.__file__).parent
    includes = [root / "include", *_cuda_includes(root)]
    with tempfile.TemporaryDirectory(prefix="compile-", dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *compiler,
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            "-w",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            *(f"-I{include}" for include in includes),
            str(source),
            f"-L{root / 'lib'}",
            "-lc10",
            "-lc10_cuda",
            "-o",
            str(made),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{source.name} could not be compiled: {error}") from error
        if done.returncode != 0:
            raise Unavailable(
                f"{source.name} could not be compiled for torch {torch.__version__}: "
                f"`{' '.join(command)}` ended with {done.returncode} and said:\n{done.stderr[-2000:]}"
            )
        os.replace(made, library)


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return named.split()
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise Unavailable(
        "there is no C++ compiler (looked for c++, g++ and clang++) to build the shim with, which takes "
        "some seconds, once: install one, for example with `apt-get install g++`, or name one with CXX"
    )


def _cuda_includes(root: Path) -> list[Path]:
    """Folders which together have CUDA's runtime headers, those that torch's packages bring first."""
    site = root.parent
    candidates = [
        *sorted(site.glob("nvidia/cu[0-9]*/include"), reverse=True),
        *site.glob("nvidia/cuda_runtime/include"),
        *site.glob("nvidia/cuda_crt/include"),
        *site.glob("triton/backends/nvidia/include"),
    ]
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            candidates.append(Path(home) / "include")
    missing = []
    for header in ("cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((folder / header).is_file() for folder in candidates):
            missing.append(header)
    if missing:
        major = str(sys.modules["torch"].version.cuda).split(".")[0]
        raise Unavailable(
            f"CUDA's headers {' and '.join(missing)} are not there, which building the shim needs: "
            f"`pip install nvidia-cuda-runtime nvidia-cuda-crt`, or set CUDA_HOME to a toolkit of CUDA {major}"
        )
    return [folder for folder in candidates if folder.is_dir()]
