"""A report for the terminal."""

import re
from typing import Any

_BOLD, _DIM, _RED, _GREEN, _CYAN, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[0m"

#: How much a person reads. The rest is in the JSON, and on the page.
MAX_GROUPS = 12
MAX_WAYS = 5

_DIFFERS = (
    (r"\[\d+\]", "[…]"),
    (r"saved by \w+", "saved by its nodes"),
    (r"of parameter \d+ of", "of a parameter of"),
)

KINDS = (
    ("live", "in use by tensors"),
    ("cached", "free in PyTorch's cache"),
    ("pending", "freed, but another stream may still use it"),
    ("fragmented", "free, between blocks in use"),
    ("context", "the CUDA context and libraries"),
    ("other_processes", "other processes"),
    ("free", "free on the device"),
)


def size(num_bytes: int) -> str:
    """Bytes as a person reads them."""
    value = float(num_bytes)
    if abs(value) < 1024:
        return f"{num_bytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1000 or unit == "TiB":
            # Three digits or so; whole numbers without a point from a hundred on.
            return f"{value:.0f} {unit}" if abs(value) >= 99.95 else f"{value:.1f} {unit}"
    raise AssertionError


class _Paint:
    def __init__(self, color: bool) -> None:
        self.color = color

    def __call__(self, code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if self.color and text else text


def report_text(data: dict[str, Any], color: bool) -> str:
    paint = _Paint(color)
    lines: list[str] = []
    failure = data["out_of_memory"]
    if failure is not None:
        where = "the CPU" if failure["device"] is None else f"cuda:{failure['device']}"
        lines.append(paint(_RED + _BOLD, f"out of memory: {size(failure['requested'])} more on {where}"))
        for device in data["devices"]:
            if device["index"] == failure["device"] and device["total"] < failure["requested"]:
                lines.append(f"  it can never fit: the whole device has {size(device['total'])}")
        for rung in failure["rungs"]:
            if rung["bytes"] or rung["microseconds"]:  # else it was not come to
                lines.append(
                    f"  tried {rung['name']}: {size(rung['bytes'])} came free in {rung['microseconds'] / 1000:.1f} ms"
                )
        lines.append("")
    for device in data["devices"]:
        lines.extend(_device_lines(device, paint))
        lines.append("")
    lines.extend(_storages_lines(data, paint))
    for note in data["notes"]:
        lines.append(f"note: {note}")
    if data["truncated"]:
        lines.append(paint(_RED, "the search stopped for want of time: there may be more holders; give report(seconds=…) more"))
    return "\n".join(lines).rstrip()


def _device_lines(device: dict[str, Any], paint: _Paint) -> list[str]:
    lines = [paint(_BOLD, f"cuda:{device['index']}  {device['name']}, {size(device['total'])}")]
    for kind, words in KINDS:
        value = device[kind]
        if value is None:
            continue
        if kind == "context" and device["other_processes"] is None:
            words += ", and other processes"
        share = 100 * value / device["total"] if device["total"] else 0
        name = kind.replace("_", " ")
        text = f"  {name:<15} {size(value):>9} {share:5.1f} %  {words}"
        lines.append(text if value else paint(_DIM, text))
    lines.append(paint(_DIM, f"  largest free block in the cache: {size(device['largest_hole'])}"))
    lines.extend(f"  {paint(_GREEN, '→')} {cure}" for cure in device["cures"] if not cure.startswith("live"))
    return lines


def _storages_lines(data: dict[str, Any], paint: _Paint) -> list[str]:
    shown, totals = data["storages"], data["totals"]
    if not shown:
        lines = ["no tensor holds memory"]
    else:
        parts = [
            f"{size(total['bytes'])} on {device} in {total['storages']} storage{_s(total['storages'])}"
            for device, total in sorted(totals.items(), key=lambda item: -item[1]["bytes"])
        ]
        lines = [paint(_BOLD, "held by tensors: ") + ", ".join(parts)]
    count = sum(total["storages"] for total in totals.values())
    groups = _groups(shown)
    told = groups[:MAX_GROUPS]
    for number, group in enumerate(told, 1):
        lines.append("")
        lines.extend(_storage_lines(group[0], paint, f"{number:>3}.", group))
    rest = count - sum(map(len, told))
    if rest > 0 and shown:
        num_bytes = sum(total["bytes"] for total in totals.values()) - sum(
            storage["bytes"] for group in told for storage in group
        )
        lines.append("")
        others = f"and {rest} other{_s(rest)}, {size(num_bytes)}{' together' if rest > 1 else ''}"
        if count > len(shown):
            others += f": report(top={count}) shows {'it' if rest == 1 else 'them'}"
        lines.append(paint(_DIM, others))
    unknown = data["native_unknown"]
    if unknown["blocks"]:
        lines.append("")
        blocks = f"{unknown['blocks']} block{_s(unknown['blocks'])}"
        lines.append(
            f"{size(unknown['bytes'])} in {blocks} of live device memory belong to no tensor that Python shows: "
            "a library, or C++ code, holds them"
        )
    return lines


def _groups(storages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Storages that one sentence tells of: alike, and held alike. The heaviest group comes first."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for storage in storages:
        cycle, paths = storage["cycle"], storage["paths"]
        held = _general(cycle["words"] if cycle else paths[0]["words"])
        groups.setdefault((storage["bytes"], storage_title(storage), storage["view"], held), []).append(storage)
    return sorted(groups.values(), key=lambda group: -len(group) * group[0]["bytes"])


def _is_of_a_library(path: dict[str, Any]) -> bool:
    """Whether the way begins in a frame of installed code, or in a hook of the interpreter."""
    first = path["steps"][0]
    hooks = re.compile(r"global `(displayhook|excepthook)[^`]*` of module `sys`")
    return "site-packages" in first.get("file", "") or bool(hooks.match(first["text"]))


def _general(words: str) -> str:
    """The words without what differs between items of a list, nodes of a graph, and parameters."""
    for pattern, words_instead in _DIFFERS:
        words = re.sub(pattern, words_instead, words)
    return words


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def storage_text(storage: dict[str, Any]) -> str:
    return "\n".join(_storage_lines(storage, _Paint(False), ""))


def storage_title(storage: dict[str, Any]) -> str:
    """What kind of tensor it is: without its size."""
    shape = "×".join(map(str, storage["shape"])) or "scalar"
    what = "parameter" if storage["is_parameter"] else ""
    return " ".join(part for part in (storage["device"], storage["dtype"] or "bytes", shape, what) if part)


def _storage_lines(
    storage: dict[str, Any], paint: _Paint, number: str, group: list[dict[str, Any]] | None = None
) -> list[str]:
    group = group or [storage]
    head = f"{number} {size(len(group) * storage['bytes']):>9}  " if number else f"{size(storage['bytes'])}  "
    if len(group) > 1:
        head += f"= {len(group)} × {size(storage['bytes'])}  "
    lines = [paint(_BOLD, head) + storage_title(storage)]
    indent = " " * (len(number) + 1) if number else "  "
    if storage["view"]:
        lines.append(f"{indent}{paint(_CYAN, storage['view'])}")
    # What a person wrote comes first; the frames of libraries between pass on what they were given.
    own = [path["words"] for path in storage["paths"] if not _is_of_a_library(path)]
    ways = own + [path["words"] for path in storage["paths"] if _is_of_a_library(path)]
    if len(group) > 1:
        # The ways that are common to all.
        common = [{_general(path["words"]) for path in each["paths"]} for each in group]
        ways = [words for words in dict.fromkeys(map(_general, ways)) if all(words in each for each in common)]
        own = [words for words in ways if words in map(_general, own)]
    num_shown = min(MAX_WAYS, len(own) or MAX_WAYS)
    lines.extend(f"{indent}{words}" for words in ways[:num_shown])
    if len(ways) > num_shown:
        lines.append(paint(_DIM, f"{indent}and {len(ways) - num_shown} more"))
    if storage["cycle"]:
        lines.append(f"{indent}a cycle: {storage['cycle']['words']}")
    lines.append(f"{indent}{paint(_GREEN, 'cure:')} {storage['cure']}")
    return lines


def growth_lines(step: int, rows: list[dict[str, Any]]) -> list[str]:
    """What grew, for `watch`; nothing if nothing did."""
    grown = [row for row in rows if row["bytes"] > 0]
    lines: list[str] = []
    for device in sorted({row["device"] for row in grown}):
        here = [row for row in grown if row["device"] == device]
        count = sum(row["storages"] for row in here)
        total = sum(row["bytes"] for row in here)
        lines.append(f"after step {step}: +{size(total)} on {device}, in {count} storage{_s(count)}")
        lines.extend(f"  {row['holder']}" + (f": +{size(row['bytes'])}" if len(here) > 1 else "") for row in here)
    return lines


def difference_text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "nothing grew"
    return "\n".join(
        f"{'+' if row['bytes'] >= 0 else '-'}{size(abs(row['bytes'])):>9}  {row['device']}  {row['holder']}" for row in rows
    )
