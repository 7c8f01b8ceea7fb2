"""A report as one page."""

from typing import Any


def page(data: dict[str, Any]) -> str:
    return "<!doctype html>"
