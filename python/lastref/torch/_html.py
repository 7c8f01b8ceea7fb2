"""A report as one page: no network, no script, the paths drawn as boxes and arrows."""

import html
import textwrap
import time
from typing import Any

from . import _text

_BOX_WIDTH, _LINE, _PAD, _GAP_X, _GAP_Y = 216, 15, 8, 44, 14
_MAX_LINES = 4
_LINE_LENGTH = 31

_COLORS = {
    "live": "#2563a8",
    "cached": "#5b9f6b",
    "pending": "#c9a227",
    "fragmented": "#c2672c",
    "context": "#7a6a9b",
    "other_processes": "#8f8f8f",
    "free": "#d9dee5",
}

_STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #5d6b7a; --line: #d5dce4; --paper: #fff; --box: #f3f6fa; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #f6f8fa; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 30px 0 10px; }
.meta, .soft { color: var(--soft); }
.alarm { background: #fdecea; border: 1px solid #e9b4ae; border-radius: 8px; padding: 12px 16px; margin: 18px 0; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; margin: 10px 0; padding: 12px 16px; }
.card > summary { cursor: pointer; list-style: none; display: grid; grid-template-columns: 92px 1fr; gap: 14px; align-items: baseline; }
.card > summary::-webkit-details-marker { display: none; }
.size { font-weight: 650; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.cure { color: #20693a; margin: 8px 0 0; } .cure::before { content: "cure: "; font-weight: 600; }
.draw { overflow-x: auto; margin-top: 10px; }
.bar { display: flex; height: 26px; border-radius: 5px; overflow: hidden; border: 1px solid var(--line); }
.bar > i { display: block; min-width: 0; }
table { border-collapse: collapse; margin-top: 10px; } td { padding: 1px 14px 1px 0; vertical-align: baseline; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; border: 1px solid #0002; }
code { font: 13px ui-monospace, monospace; background: #eef2f6; border-radius: 3px; padding: 0 3px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .kind { fill: var(--soft); font-size: 10.5px; }
ul { margin: 6px 0; padding-left: 20px; }
"""


def page(data: dict[str, Any]) -> str:
    """The whole page."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(data["time"]))
    rank = "" if data["rank"] is None else f", rank {data['rank']}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Who holds the memory: {_escape(data['program'] or 'lastref')}</title>",
        f"<style>{_STYLE}</style></head><body><main>",
        "<h1>Who holds the memory</h1>",
        f'<div class="meta">{_escape(data["program"])} on {_escape(data["host"])}, process {data["pid"]}{rank}, '
        f"{when}; torch {_escape(data['torch'])}, lastref {_escape(data['lastref'])}; "
        f"{data['objects']:,} objects searched in {data['seconds']:.2f} s</div>",
    ]
    if data["out_of_memory"] is not None:
        parts.append(_failure(data["out_of_memory"]))
    if data["truncated"]:
        parts.append('<div class="alarm">The search stopped for want of time: there may be more holders.</div>')
    parts.extend(_device(device) for device in data["devices"])
    parts.append("<h2>Heaviest storages</h2>")
    totals = [
        f"{_text.size(total['bytes'])} on {_escape(device)} in {total['storages']:,}"
        for device, total in sorted(data["totals"].items(), key=lambda item: -item[1]["bytes"])
    ]
    parts.append(f'<div class="soft">Found in all: {", ".join(totals) or "none"}.</div>')
    parts.extend(_storage(storage, number) for number, storage in enumerate(data["storages"]))
    unknown = data["native_unknown"]
    if unknown["blocks"]:
        parts.append(
            f'<div class="card">{_text.size(unknown["bytes"])} in {unknown["blocks"]} blocks of live device memory '
            "belong to no tensor that Python shows: a library, or C++ code, holds them.</div>"
        )
    if data["notes"]:
        parts.append("<ul>" + "".join(f"<li>{_escape(note)}</li>" for note in data["notes"]) + "</ul>")
    parts.append("</main></body></html>")
    return "\n".join(parts)


def _escape(text: object) -> str:
    return html.escape(str(text))


def _code(text: str) -> str:
    """Names in ticks as code."""
    pieces = _escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if at % 2 else piece for at, piece in enumerate(pieces))


def _failure(failure: dict[str, Any]) -> str:
    where = "the CPU" if failure["device"] is None else f"cuda:{failure['device']}"
    rungs = "".join(
        f"<li>{_escape(rung['name'])}: {_text.size(rung['bytes'])} came free in {rung['microseconds'] / 1000:.1f} ms</li>"
        for rung in failure["rungs"]
    )
    tried = f"<div>Tried before it failed:</div><ul>{rungs}</ul>" if rungs else ""
    return f'<div class="alarm"><b>Out of memory: {_text.size(failure["requested"])} more on {where}.</b>{tried}</div>'


def _device(device: dict[str, Any]) -> str:
    total = device["total"] or 1
    bar, rows = [], []
    for kind, words in _text.KINDS:
        value = device[kind]
        if value is None:
            continue
        name = kind.replace("_", " ")
        if kind == "context" and device["other_processes"] is None:
            words += ", and other processes"
        bar.append(f'<i style="flex:{value} 0 0;background:{_COLORS[kind]}" title="{name}: {_text.size(value)}"></i>')
        rows.append(
            f'<tr><td><span class="dot" style="background:{_COLORS[kind]}"></span>{name}</td>'
            f'<td class="n" title="{value:,} bytes">{_text.size(value)}</td><td class="n">{100 * value / total:.1f} %</td>'
            f'<td class="soft">{words}</td></tr>'
        )
    cures = "".join(f"<li>{_escape(cure)}</li>" for cure in device["cures"])
    return (
        f"<h2>cuda:{device['index']} · {_escape(device['name'])} · {_text.size(device['total'])}</h2>"
        f'<div class="card"><div class="bar">{"".join(bar)}</div><table>{"".join(rows)}</table>'
        f'<div class="soft">Largest free block in the cache: {_text.size(device["largest_hole"])}.</div>'
        f"<ul>{cures}</ul></div>"
    )


def _storage(storage: dict[str, Any], number: int) -> str:
    first = storage["paths"][0]["words"] if storage["paths"] else f"a cycle: {storage['cycle']['words']}"
    more = len(storage["paths"]) - 1
    also = f' <span class="soft">and {more} more</span>' if more > 0 else ""
    view = f'<div class="soft">{_escape(storage["view"])}</div>' if storage["view"] else ""
    opened = " open" if number < 5 else ""
    cures = dict.fromkeys([storage["cure"], *(path["cure"] for path in storage["paths"])])
    return (
        f'<details class="card"{opened}><summary><span class="size" title="{storage["bytes"]:,} bytes">'
        f"{_text.size(storage['bytes'])}</span><span>{_escape(_text.storage_title(storage))}<br>"
        f"{_code(first)}{also}</span></summary>{view}"
        f'<div class="draw">{_drawing(storage, number)}</div>'
        + "".join(f'<p class="cure">{_code(cure)}</p>' for cure in list(cures)[:4])
        + "</details>"
    )


# The picture


def _lines(text: str) -> list[str]:
    lines = textwrap.wrap(text.replace("`", ""), _LINE_LENGTH) or [""]
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], lines[_MAX_LINES - 1][: _LINE_LENGTH - 1] + "…"]
    return lines


class _Canvas:
    def __init__(self, number: int) -> None:
        self.parts: list[str] = []
        self.width = self.height = 0.0
        self.head = f"head{number}"

    def box(self, x: float, y: float, lines: list[str], note: str, *, fill: str = "#f3f6fa", stroke: str = "#8fa1b5") -> float:
        """Draws a box and returns its height."""
        height = self.box_height(lines, note)
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{_BOX_WIDTH}" height="{height}" rx="6" fill="{fill}" stroke="{stroke}"/>'
        )
        for at, line in enumerate(lines):
            self.parts.append(f'<text x="{x + _PAD}" y="{y + _PAD + 11 + at * _LINE}">{_escape(line)}</text>')
        if note:
            self.parts.append(
                f'<text class="kind" x="{x + _PAD}" y="{y + height - _PAD + 1}">{_escape(note[: _LINE_LENGTH + 6])}</text>'
            )
        self.width = max(self.width, x + _BOX_WIDTH)
        self.height = max(self.height, y + height)
        return height

    @staticmethod
    def box_height(lines: list[str], note: str) -> float:
        return 2 * _PAD + len(lines) * _LINE + (13 if note else 0)

    def arrow(self, path: str) -> None:
        self.parts.append(f'<path d="{path}" fill="none" stroke="#5d6b7a" stroke-width="1.4" marker-end="url(#{self.head})"/>')

    def svg(self) -> str:
        width, height = self.width + 4, self.height + 4
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}"><defs><marker id="{self.head}" viewBox="0 0 10 10" refX="9" refY="5" '
            'markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="#5d6b7a"/></marker></defs>'
            + "".join(self.parts)
            + "</svg>"
        )


def _drawing(storage: dict[str, Any], number: int) -> str:
    canvas = _Canvas(number)
    title = [_text.size(storage["bytes"]), *_lines(_text.storage_title(storage))]
    if storage["cycle"] and not storage["paths"]:
        _cycle(canvas, storage["cycle"], title)
        return canvas.svg()
    paths = [path["steps"] for path in storage["paths"]]
    columns = max(len(path) for path in paths)
    # Paths that begin alike share those boxes: rows are the leaves of a tree.
    y, ends = 2.0, []
    last: list[tuple[str, float, float]] = []
    for path in sorted(paths, key=lambda path: [step["text"] for step in path]):
        shared = 0
        while shared < len(path) - 1 and shared < len(last) and last[shared][0] == path[shared]["text"]:
            shared += 1
        drawn = last[:shared]
        row_height = 0.0
        for column in range(shared, len(path)):
            step = path[column]
            x = 2 + column * (_BOX_WIDTH + _GAP_X)
            height = canvas.box(x, y, _lines(step["text"]), step["type"])
            middle = y + height / 2
            if column > 0:
                before = drawn[column - 1]
                canvas.arrow(_curve(before[1] + _BOX_WIDTH, before[2], x, middle))
            drawn = [*drawn[:column], (step["text"], x, middle)]
            row_height = max(row_height, height)
        last = drawn
        ends.append((drawn[-1][1] + _BOX_WIDTH, drawn[-1][2]))
        y += row_height + _GAP_Y
    x = 2 + columns * (_BOX_WIDTH + _GAP_X)
    middle = max(2 + canvas.box_height(title, "") / 2, (ends[0][1] + ends[-1][1]) / 2)
    canvas.box(x, middle - canvas.box_height(title, "") / 2, title, "", fill="#e3eefb", stroke="#2563a8")
    for end_x, end_y in ends:
        canvas.arrow(_curve(end_x, end_y, x, middle))
    return canvas.svg()


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    bend = min(_GAP_X, (x2 - x1) / 2)
    if x2 - x1 > _GAP_X + 1:  # over empty columns: straight, then to the box
        return f"M{x1} {y1}L{x2 - _GAP_X} {y1}C{x2 - _GAP_X / 2} {y1} {x2 - _GAP_X / 2} {y2} {x2 - 1} {y2}"
    return f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2 - 1} {y2}"


def _cycle(canvas: _Canvas, cycle: dict[str, Any], title: list[str]) -> None:
    """The objects of a cycle on a ring of two rows, with the storage at its side."""
    objects = cycle["objects"]
    fill, stroke = ("#eaf5ec", "#5b9f6b") if cycle["collectable"] else ("#fdecea", "#c2672c")
    boxes = [_lines(text) for text in objects]
    top = boxes[: (len(boxes) + 1) // 2]
    bottom = boxes[len(top) :]
    room = max(canvas.box_height(lines, "") for lines in boxes)
    places: list[tuple[float, float, float]] = []
    step = _BOX_WIDTH + _GAP_X
    y_top = 26.0
    y_bottom = y_top + room + 46
    for at, lines in enumerate(top):
        places.append((2 + at * step, y_top, canvas.box(2 + at * step, y_top, lines, "", fill=fill, stroke=stroke)))
    for at, lines in enumerate(bottom):
        across = 2 + (len(top) - 1 - at) * step
        places.append((across, y_bottom, canvas.box(across, y_bottom, lines, "", fill=fill, stroke=stroke)))
    half = _BOX_WIDTH / 2
    if len(places) == 1:
        x, y, _ = places[0]
        canvas.arrow(f"M{x + half + 40} {y}C{x + half + 40} {y - 34} {x + half - 40} {y - 34} {x + half - 40} {y - 1}")
    for at, (left, y, height) in enumerate(places if len(places) > 1 else []):
        x2, y2, height2 = places[(at + 1) % len(places)]
        if y == y2:
            right = x2 > left
            canvas.arrow(
                f"M{left + (_BOX_WIDTH if right else 0)} {y + height / 2}L{x2 + (-1 if right else _BOX_WIDTH + 1)} {y2 + height2 / 2}"
            )
        elif y < y2:
            canvas.arrow(f"M{left + half + 24} {y + height}L{x2 + half + 24} {y2 - 1}")
        else:
            canvas.arrow(f"M{left + half - 24} {y}L{x2 + half - 24} {y2 + height2 + 1}")
    x, y, height = places[0]
    storage_x = 2 + len(top) * step
    storage_height = canvas.box(storage_x, y_top, title, "", fill="#e3eefb", stroke="#2563a8")
    canvas.arrow(
        f"M{x + half - 60} {y}C{x + half - 60} {y - 26} {storage_x + half} {y - 30} {storage_x + half} {y_top - 1}"
    )
    del storage_height
    verdict = "gc.collect() frees this cycle" if cycle["collectable"] else cycle["words"].rsplit("; ", 1)[-1]
    bottom_y = canvas.height + 20
    canvas.parts.append(f'<text x="4" y="{bottom_y}">{_escape(verdict)}</text>')
    canvas.height = bottom_y + 6
