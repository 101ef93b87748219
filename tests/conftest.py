"""Shared set-up: no network, few threads, visible skips for tests that need a GPU."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """Train and sample on the CPU whatever the machine has: for comparisons with what runs there."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.trainer", "tools.generate"):
            patch.setattr(f"shardline.{module}.choose_device", lambda: torch.device("cpu"))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
