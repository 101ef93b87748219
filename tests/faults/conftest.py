"""The laboratory that all trials of checkpoints share, and the table of what happened in it."""

import json
import os
from pathlib import Path

import pytest

from tests import proven
from tests.faults.nursery import Nursery
from tests.faults.trials import SEED, Lab

NO_FAULTS = (
    "test_wire_bytes",
    "test_ranks_on_two_hosts_sum",
    "test_random_legs_can_be_run",
    "test_machines_find",
    "test_three_hosts",
)


@pytest.fixture(autouse=True)
def one_fault(request):
    """A test here is one fault; the laboratory counts its own."""
    if "lab" not in request.fixturenames and not any(name in request.node.nodeid for name in NO_FAULTS):
        proven.note("fault", request.node.nodeid)


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def lab(nursery, tmp_path_factory, request):
    lab = Lab(nursery, tmp_path_factory.mktemp("faults"))
    yield lab
    plugins = request.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")
    if reporter is not None:  # not in a process of pytest-xdist
        with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
            for line in ("", f"seed {SEED} (SHARDLINE_FAULT_SEED)", *lab.lines()):
                reporter.write_line(line)
    place = os.environ.get("SHARDLINE_FAULT_TABLE")
    if place:
        names = ("point", "action", "outcome", "count")
        rows = [dict(zip(names, (*key, count), strict=True)) for key, count in sorted(lab.table.items())]
        Path(place).write_text(json.dumps({"seed": SEED, "rows": rows}, indent=1) + "\n")
