"""Hands out tests to the processes of pytest-xdist one by one, but those of some files to one process, in order.

The groups of pytest-xdist 3.8 have no effect with pytest 9: they change a name that it no longer reads.
"""

from typing import Any

import pytest

TOGETHER = ("docs/test_commands.py", "faults/test_wire_bytes.py")  # steps that follow from each other, one long set-up


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((path for path in TOGETHER if nodeid.startswith(f"tests/{path}")), nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Hand out again what a process that died had not done; the test that it died in has failed.

            The scheduler of pytest-xdist 3.8 also hands out what was done, and waits for it for ever.
            """
            units = [unit for unit in self.assigned_work.pop(node).values() if not all(unit.values())]
            left = [[nodeid for nodeid, done in unit.items() if not done] for unit in units]
            if not left:
                return None
            crashed = left[0].pop(0)
            for nodeids in filter(None, left):
                self.workqueue[self._split_scope(nodeids[0])] = dict.fromkeys(nodeids, False)
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return Scheduling(config, log)
