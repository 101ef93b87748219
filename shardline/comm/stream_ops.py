"""Words of device memory that a stream writes, or waits for, in its turn, without a kernel.

The driver's own functions (cuStreamWriteValue32, cuStreamWaitValue32): torch has none that waits. A word may lie in the
memory of another GPU that is mapped here, so that one rank's stream can hold until another rank's stream has come
somewhere. What a stream wrote before a word is there for whoever has seen the word.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

WORD = 4  # bytes
_EQUAL = 1


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return library


def write(stream: torch.cuda.Stream, address: int, value: int) -> None:
    _check(_driver().cuStreamWriteValue32_v2(stream.cuda_stream, address, value, 0), "write")


def wait(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Until the word has that value."""
    _check(_driver().cuStreamWaitValue32_v2(stream.cuda_stream, address, value, _EQUAL), "wait for")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"the driver cannot {what} a word of memory in a stream (error {code})")
