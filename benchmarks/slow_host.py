"""Imported by runs of `semi_sync.py --paces`: forward and backward of rank r take PACES[r] seconds at least.

It stands for hosts of different speed. The rest of the time is slept, so other work of the machine changes little.
"""

import os
import time
from typing import Any

from shardline.training.whole_model import WholeModel

SECONDS = float(os.environ["SEMI_SYNC_PACES"].split()[int(os.environ.get("RANK", "0"))])  # a launcher has no rank
_forward_backward = WholeModel.forward_backward


def _paced(self: WholeModel, *arguments: Any) -> Any:
    began = time.perf_counter()
    found = _forward_backward(self, *arguments)
    time.sleep(max(0.0, began + SECONDS - time.perf_counter()))
    return found


WholeModel.forward_backward = _paced  # type: ignore[method-assign]
