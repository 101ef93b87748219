"""The compiler's start: its caches, and what it imports."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

import torch

from shardline.config.schema import Compile

PACKAGE = Path(__file__).parents[1]
PREFIX = "shardline-"
ROOMS = ("comm", "memory", "models", "parallel", "precision", "training")  # whose code graphs contain or name


def separate_caches() -> None:
    """Give the compiler's caches a folder for this version of our code, and let them keep what they can.

    Their keys contain a graph, but not the code of our operations and of their gradients: after a change, a run would
    find what was compiled from the code before it. Triton's keys contain the code. Its folder is named here because the
    compiler names it only when it loads its first kernel, and kernels that ran before would go to another folder.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    given, name = Path(cache_dir()), PREFIX + source_hash(PACKAGE)
    folder = given.parent if given.name.startswith(PREFIX) else given
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / name)
    if torch.cuda.is_available():
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(torch.cuda.current_device()))
    options: Any = torch._functorch.config
    options.autograd_cache_allow_custom_autograd_functions = True  # our functions are pure, and traced into the key


@functools.cache
def source_hash(package: Path) -> str:
    """A short hash of the Python files in ROOMS."""
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(file for room in ROOMS for file in (package / room).rglob("*.py")):
        found.update(f"{file.relative_to(package)}\0".encode())
        found.update(hashlib.blake2b(file.read_bytes()).digest())
    return found.hexdigest()


def load_compiler(how: Compile) -> None:
    """Import what the first compilation needs, which takes about a second."""
    if how.enable and how.backend == "inductor":
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("torch._functorch.aot_autograd")
