"""Imported by runs of `semi_sync.py --paces`: forward and backward of rank r take at least PACES[r] seconds.

This simulates hosts of different speeds. The rest of the time is spent sleeping, so other work on the machine matters
little.
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
