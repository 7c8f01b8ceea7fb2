"""docs/not-freed.md: its programs run, and print what it says.

Below each line ``<!-- program: NAME -->`` the guide has the program and its output. With LASTREF_BLESS=1 both
are written anew; read the difference before you commit it."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
from collections.abc import Callable

import pytest

RunTorch = Callable[..., "subprocess.CompletedProcess[str]"]

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
GUIDE = DOCS / "not-freed.md"
BLESS = os.environ.get("LASTREF_BLESS") == "1"
PROGRAMS = sorted(path.name for path in (DOCS / "not-freed").glob("[0-9]*.py"))

#: Under others some libraries hold other memory, and the numbers differ.
WRITTEN_UNDER = "2.15"
needs_that_torch = pytest.mark.skipif(
    not importlib.metadata.version("torch").startswith(WRITTEN_UNDER),
    reason=f"the guide shows what is printed under torch {WRITTEN_UNDER}",
)

# What stands in for another process, and what a real one is.
ENVIRONMENT = {"12-another-process.py": {"LASTREF_STANDIN_OTHER_MEMORY": "6000MiB"}}


def block(name: str) -> "re.Pattern[str]":
    """The program and its output in the guide."""
    return re.compile(
        rf"<!-- program: {re.escape(name)} -->\n(?:\n```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```\n)?",
        re.S,
    )


def without_what_varies(text: str) -> str:
    """The text without what differs between machines, versions and runs."""
    text = re.sub(r"ipython-input-\d+-[0-9a-f]+", "ipython-input", text)
    text = re.sub(r"[\d.]+ (ms|us|s)\b", r"T \1", text)
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    # Lines of files that are not the guide's own.
    return re.sub(r"\((?!\d\d-)([\w.-]+\.py):\d+\)", r"(\1)", text)


@needs_that_torch
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_guide_says_what_is_printed(name: str, run_torch: RunTorch) -> None:
    program = (DOCS / "not-freed" / name).read_text()
    done = run_torch("-W", "ignore", name, cwd=DOCS / "not-freed", env=ENVIRONMENT.get(name))
    printed = "\n".join(line.rstrip() for line in done.stdout.rstrip().split("\n")) + "\n"
    assert len(printed) < 6000, "an output that nobody reads"
    found = block(name).search(GUIDE.read_text())
    assert found is not None, f"the guide has no program {name}"
    if BLESS:
        new = f"<!-- program: {name} -->\n\n```python\n{program}```\n\nprints\n\n```text\n{printed}```\n"
        GUIDE.write_text(block(name).sub(lambda _: new, GUIDE.read_text()))
        return
    assert found[1] == program, "the guide has another program: LASTREF_BLESS=1"
    assert without_what_varies(found[2]) == without_what_varies(printed), (
        "LASTREF_BLESS=1 writes the guide anew"
    )


def test_the_guide_has_these_programs_and_no_others() -> None:
    assert re.findall(r"<!-- program: (\S+) -->", GUIDE.read_text()) == PROGRAMS


@needs_that_torch
def test_the_readme_shows_what_is_printed(tmp_path: pathlib.Path, run_torch: RunTorch) -> None:
    program = DOCS / "not-freed" / "train.py"
    done = run_torch(
        "-W",
        "ignore",
        "-m",
        "lastref.torch",
        "--report-dir",
        str(tmp_path),
        program.name,
        cwd=program.parent,
        status=1,
    )
    lines = done.stderr[done.stderr.index("\nout of memory: ") + 1 :].split("\n")
    start = next(at for at, line in enumerate(lines) if line.startswith("held by tensors"))
    end = next(at for at, line in enumerate(lines) if line.startswith("  3. "))
    excerpt = "\n".join([lines[0], "...", *lines[start : end - 1], "...", ""])
    readme = DOCS.parent / "README.md"
    found = re.search(r"(?<=<!-- excerpt -->\n```text\n).*?(?=```)", readme.read_text(), re.S)
    assert found is not None
    if BLESS:
        text = readme.read_text()
        readme.write_text(text[: found.start()] + excerpt + text[found.end() :])
        return
    assert without_what_varies(found[0]) == without_what_varies(excerpt), (
        "LASTREF_BLESS=1 writes it anew"
    )


def test_the_guides_links_lead_somewhere() -> None:
    text = GUIDE.read_text()
    anchors = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (DOCS / target).exists(), target


def test_examples_in_the_documentation(run_torch: RunTorch) -> None:
    program = """
import doctest, importlib, pkgutil, sys, lastref.torch
finder = doctest.DocTestFinder()
runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
for module in pkgutil.iter_modules(lastref.torch.__path__):
    if module.name not in ("__main__", "_start"):
        name = f"lastref.torch.{module.name}"
        for test in finder.find(importlib.import_module(name), name):
            # Names are then those of a program's own globals, as where a person types them.
            test.globs = vars(sys.modules["__main__"])
            runner.run(test, clear_globs=False)
print(runner.tries, runner.failures)
"""
    tries, failures = run_torch("-c", program).stdout.splitlines()[-1].split()
    assert int(tries) >= 15
    assert int(failures) == 0


def test_everything_public_has_a_docstring(run_torch: RunTorch) -> None:
    program = """
import lastref.torch, lastref.torch.metrics
for module in (lastref.torch, lastref.torch.metrics):
    for name in module.__all__:
        item = getattr(module, name)
        assert item.__doc__, name
        for key, value in vars(item).items() if isinstance(item, type) else ():
            assert key.startswith("_") or not callable(value) or value.__doc__, (name, key)
"""
    run_torch("-c", program)
