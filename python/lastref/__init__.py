"""GPU memory that comes back when the last reference goes.

The names and meanings are those of ``torch`` and ``torch.cuda``, for the part that owns memory:

>>> import lastref as torch
>>> t = torch.zeros(2, 3)
>>> t.shape, t.dtype, t.is_cuda
(lastref.Size([2, 3]), lastref.float32, False)

A variable is a reference. Giving it a new value never moves the old tensor: it drops one
reference, and when that was the last one, the tensor's memory is freed at that moment. Device
memory then stays in a cache until `lastref.cuda.empty_cache`, or until it is needed.

lastref owns memory and moves bytes; it is not a deep-learning framework, and its tensors have no
arithmetic, not even ``==``. NumPy, PyTorch, CuPy and JAX compute on the same memory through DLPack
(``numpy.from_dlpack(t)``, ``lastref.from_dlpack(a)``), NumPy also through the buffer protocol
(``t.numpy()``).

What objects hold that refer to each other in a circle is found by the cycle collector, which runs by
itself, and before any allocation fails for want of memory: `lastref.gc`.

A GPU is used when there is one. A simulated GPU stands in only when asked for: by the environment
variable ``LASTREF_SIM`` (``8GiB``, ``2x8GiB``, ``11GB``, ``11000MiB``) or by `lastref.sim.enable`.
"""

import sys as _sys

if "t" in _sys.abiflags:
    raise ImportError(
        "lastref: free-threaded CPython is not supported yet, since the cycle collector relies on the "
        "interpreter lock; use the build of CPython that has it"
    )

from . import cuda, gc, sim, snapshot
from ._lastref import (
    Event,
    OutOfMemoryError,
    Stream,
    Tensor,
    UntypedStorage,
    __version__,
    arange,
    as_tensor,
    bfloat16,
    bool,
    device,
    double,
    dtype,
    empty,
    empty_like,
    float,
    float16,
    float32,
    float64,
    from_dlpack,
    from_numpy,
    full,
    full_like,
    half,
    int,
    int8,
    int16,
    int32,
    int64,
    is_tensor,
    long,
    ones,
    ones_like,
    short,
    tensor,
    uint8,
    zeros,
    zeros_like,
)
from ._size import Size

__all__ = [
    "Event",
    "OutOfMemoryError",
    "Size",
    "Stream",
    "Tensor",
    "UntypedStorage",
    "__version__",
    "arange",
    "as_tensor",
    "bfloat16",
    "bool",
    "cuda",
    "device",
    "double",
    "dtype",
    "empty",
    "empty_like",
    "float",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "from_numpy",
    "full",
    "full_like",
    "gc",
    "half",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_tensor",
    "long",
    "ones",
    "ones_like",
    "short",
    "sim",
    "snapshot",
    "tensor",
    "uint8",
    "zeros",
    "zeros_like",
]
