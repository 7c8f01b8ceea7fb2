"""How a tensor is shown, which follows PyTorch's rules with its default print options.

Only what is shown is read from the device: of a large tensor that is three elements at both ends of
each dimension.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from ._lastref import Tensor

# PyTorch's defaults.
PRECISION = 4
THRESHOLD = 1000  # elements; a larger tensor is summarized
EDGE_ITEMS = 3
LINE_WIDTH = 80

# Shown without a dtype, since a tensor made from the shown values would have it.
DEFAULT_DTYPES = ("lastref.float32", "lastref.int64", "lastref.bool")


def format_tensor(tensor: Tensor) -> str:
    """The text of ``repr(tensor)``."""
    prefix = "tensor("
    dtype = str(tensor.dtype)
    suffixes = []
    if tensor.is_cuda:
        suffixes.append(f"device='{tensor.device}'")
    if tensor.numel() == 0:
        body = "[]"
        if tensor.dim() != 1:
            suffixes.append(f"size={tuple(tensor.shape)}")
        shows_dtype = dtype != "lastref.float32"
    else:
        values = _shown_values(tensor, summarize=tensor.numel() > THRESHOLD)
        to_text, width = _element_format(list(_flatten(values)))
        body = _format_values(values, to_text, width, indent=len(prefix))
        shows_dtype = dtype not in DEFAULT_DTYPES
    if shows_dtype:
        suffixes.append(f"dtype={dtype}")
    return prefix + _append(body, suffixes, indent=len(prefix)) + ")"


def _shown_values(tensor: Tensor, *, summarize: bool) -> Any:
    """The elements as nested lists, with ``...`` where elements are left out."""
    if not summarize or tensor.dim() == 0:
        return tensor.tolist()
    length = len(tensor)
    if length <= 2 * EDGE_ITEMS:
        if tensor.dim() == 1:
            return tensor.tolist()
        return [_shown_values(row, summarize=True) for row in tensor]
    head, tail = tensor[:EDGE_ITEMS], tensor[length - EDGE_ITEMS :]
    shown: list[Any] = _shown_values(head, summarize=True)
    return [*shown, ..., *_shown_values(tail, summarize=True)]


def _flatten(values: Any) -> Iterator[Any]:
    if isinstance(values, list):
        for value in values:
            yield from _flatten(value)
    elif values is not ...:
        yield values


def _element_format(values: list[Any]) -> tuple[Callable[[Any], str], int]:
    """How to write one element, and the width to pad it to."""
    if not isinstance(values[0], float):
        return str, max(len(str(value)) for value in values)
    # Zeros, infinities and nan adapt to the others; they may be wider than these.
    values = [value for value in values if math.isfinite(value) and value != 0]
    to_text = _float_format([abs(value) for value in values])
    return to_text, max((len(to_text(value)) for value in values), default=1)


def _float_format(magnitudes: list[float]) -> Callable[[float], str]:
    """How to write floats of which the finite ones other than zero have these magnitudes."""

    def whole(value: float) -> str:
        return f"{value:.0f}." if math.isfinite(value) else str(value)

    def fixed(value: float) -> str:
        return f"{value:.{PRECISION}f}"

    def scientific(value: float) -> str:
        return f"{value:.{PRECISION}e}"

    if not magnitudes:
        return whole
    smallest, largest = min(magnitudes), max(magnitudes)
    wide = largest / smallest > 1000 or largest > 1e8
    if all(value.is_integer() for value in magnitudes):
        return scientific if wide else whole
    return scientific if wide or smallest < 1e-4 else fixed


def _format_values(values: Any, to_text: Callable[[Any], str], width: int, indent: int) -> str:
    if not isinstance(values, list):
        return to_text(values)
    if not any(isinstance(value, list) for value in values):
        texts = [" ..." if value is ... else to_text(value).rjust(width) for value in values]
        per_line = max(1, (LINE_WIDTH - indent) // (width + 2))
        lines = [", ".join(texts[i : i + per_line]) for i in range(0, len(texts), per_line)]
        return "[" + (",\n" + " " * (indent + 1)).join(lines) + "]"
    depth = _depth(values)
    rows = [
        "..." if value is ... else _format_values(value, to_text, width, indent + 1)
        for value in values
    ]
    return "[" + ("," + "\n" * (depth - 1) + " " * (indent + 1)).join(rows) + "]"


def _depth(values: Any) -> int:
    return 1 + _depth(values[0]) if isinstance(values, list) else 0


def _append(body: str, suffixes: list[str], indent: int) -> str:
    """Puts the suffixes after the body, each on a new line where it would not fit."""
    text = body
    last_line = len(body) - body.rfind("\n") + (indent if "\n" not in body else 0)
    for suffix in suffixes:
        if last_line + len(suffix) + 2 > LINE_WIDTH:
            text += ",\n" + " " * indent + suffix
            last_line = indent + len(suffix)
        else:
            text += ", " + suffix
            last_line += len(suffix) + 2
    return text
