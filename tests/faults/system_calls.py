"""What ranks do whose system calls fail: they train as in other trials, behind system_calls.c.

The library is loaded with the nursery; what fails in which rank is in the environment that the rank gives itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence


def train(words: Sequence[str]) -> int:
    """The last word has, for each rank, the variables that the library reads."""
    from tests.faults.nursery import train as train_on

    os.environ.update(json.loads(words[3]).get(words[1], {}))
    return train_on(words)
