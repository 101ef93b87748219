"""Training with the products over shared memory of GPUs gives one process's numbers.

    SHARDLINE_PARITY_DEVICE=cuda benchmarks/one_gpu.sh 4 python -m pytest tests/parity/test_fused_training_gpu.py

(Four ranks are the most that a case has; with a GPU for each, without the script.)
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from shardline.parallel.tensor.backend_table import choices
from tests.parity.cases import ASYNC, BF16, BIASES, COMPILE, FULL_AC, OP_AC, QK_NORM, TIED, WHOLE_VALIDATION
from tests.parity.harness import BFLOAT16, DEVICE, FLOAT32, Harness, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="SHARDLINE_PARITY_DEVICE is not cuda"),
]
TP, FSDP = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_shard_degree"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {}),
    "tp2-bf16": (2, BF16),
    "tp2-tied-biases-qk-norm": (2, TIED | BIASES | QK_NORM),
    "tp2-full-ac": (2, FULL_AC),
    "tp2-op-ac": (2, OP_AC),
    "tp2-compile": (2, COMPILE),
    "tp2-bf16-compile-op-ac": (2, BF16 | COMPILE | OP_AC),
    "tp2-validation": (2, WHOLE_VALIDATION),
    "tp4": (4, {TP: 4}),
    "tp2-fsdp2": (4, {FSDP: 2}),
    "tp2-fsdp2-bf16": (4, {FSDP: 2} | BF16),
}


@contextlib.contextmanager
def carried_by(trainer: Any, backend: str) -> Iterator[None]:
    assert {choice.backend for choice in choices.chosen.values()} == {backend}, choices.chosen
    yield


@pytest.mark.parametrize("backend", ["symmetric", "fused"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_is_that_of_one_process(harness: Harness, name: str, backend: str) -> None:
    ranks, more = LAYOUTS[name]
    overrides = {TP: 2} | ASYNC | {"parallelism.async_tensor_parallel_backend": backend} | more
    reference = harness.reference(overrides)
    seen = harness.run(overrides, ranks, functools.partial(carried_by, backend=backend))
    compare(reference, seen, BFLOAT16 if "bf16" in name else FLOAT32)
