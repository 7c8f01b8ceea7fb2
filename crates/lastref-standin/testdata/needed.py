"""Lists what programs need of the stand-in: ``python3 needed.py SITE-PACKAGES...``, folders that have torch."""

import re
import subprocess
import sys
from pathlib import Path

OURS = re.compile(r"_*cuda[A-Z]\w*|cu[A-Z]\w*|nvml[A-Z]\w*|cublas\w+")
#: Of libraries that the stand-in does not play.
OTHERS = re.compile(r"cuFile|cuRAND|cuFFT")


def symbols(path: Path, kind: str) -> set[str]:
    done = subprocess.run(["nm", "-D", kind, str(path)], capture_output=True, text=True, check=False)
    names = {line.split()[-1].split("@")[0] for line in done.stdout.splitlines() if line.split()}
    return {name for name in names if OURS.fullmatch(name) and not OTHERS.match(name)}


needed: set[str] = set()
for folder in map(Path, sys.argv[1:]):
    for library in (folder / "torch").rglob("*.so"):
        needed |= symbols(library, "--undefined-only")
    for library in folder.rglob("libcudart.so.1*"):
        needed |= symbols(library, "--defined-only")
print("\n".join(sorted(needed)))
