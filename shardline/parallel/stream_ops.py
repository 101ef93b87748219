"""What a stream can do without a multiprocessor, by the driver's own functions: torch has none for them.

write, wait    a word of memory, perhaps another GPU's that is mapped here: one rank's stream can hold until another
               rank's stream has come somewhere; what a stream wrote before the word is there for who has seen it
copy           by a copy engine, also between two places of one GPU, where a plain copy is a kernel
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
