"""Shared set-up: no network, few threads, visible skips for tests that need a GPU, and how tests run side by side."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A store of torch asks the name server what 127.0.0.1 is called; one that does not answer costs five seconds a process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import examples, leftovers, prefork, processes, progress, proven, scheduling

torch.set_num_threads(1)
examples.load_profile()
processes.reset_signals()

# Files that take long are begun first: a long one at the end would run alone.
UNITS = ("unit/parallel/test_fused", "unit/tools/", "unit/launch/", "unit/parallel/", "unit/data/", "unit/checkpoint/")
LONG = ("docs/test_commands", "parity/test_layouts", "faults/", "parity/", "e2e/", *UNITS)
MOST_PROCESSES = 6


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(proven, "proven")
    if prefork.wanted():
        prefork.install()
    if hasattr(config, "workerinput"):
        return  # a process of pytest-xdist: the one that started it reports and tidies up
    config.pluginmanager.register(leftovers.Guard(), "leftovers")
    config.pluginmanager.register(proven.Tally(), "tally")
    if config.getoption("numprocesses", None):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        config.pluginmanager.register(progress.Progress(reporter), "progress")
        config.pluginmanager.register(scheduling, "scheduling")


def pytest_collection_finish() -> None:
    """What was imported and collected stays for ever: without it the collections that each run makes are short."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    prefork.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait more than they compute."""
    return min(len(os.sched_getaffinity(0)) + 1, MOST_PROCESSES)


@pytest.fixture(autouse=True)
def ended_processes() -> Iterator[None]:
    """What a test starts ends with it, and so does a switch that a run in this process sets for all of torch."""
    yield
    processes.end_all()
    if "tests.parity.pool" in sys.modules:
        sys.modules["tests.parity.pool"].free_memory()
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """Train and sample on the CPU whatever the machine has: for comparisons with what runs there."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("training.setup", "tools.saved_model"):
            patch.setattr(f"shardline.{module}.choose_device", lambda: torch.device("cpu"))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        _long_first(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def _long_first(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.nodeid.removeprefix("tests/")
        return next((number for number, start in enumerate(LONG) if path.startswith(start)), len(LONG))

    items.sort(key=place)
