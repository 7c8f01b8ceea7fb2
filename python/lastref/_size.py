"""The type of a tensor's shape."""

import math
from typing import Any, SupportsIndex, overload


class Size(tuple[int, ...]):
    """The shape of a tensor: a tuple of ints.

    >>> import lastref
    >>> size = lastref.empty(4, 5).shape
    >>> size, size[0], size.numel(), size == (4, 5)
    (lastref.Size([4, 5]), 4, 20, True)
    """

    __slots__ = ()

    def numel(self) -> int:
        """The number of elements of a tensor of this shape."""
        return math.prod(self)

    @overload
    def __getitem__(self, key: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> "Size": ...
    def __getitem__(self, key: Any, /) -> "int | Size":
        item = super().__getitem__(key)
        return Size(item) if isinstance(key, slice) else item

    def __repr__(self) -> str:
        return f"lastref.Size({list(self)})"
