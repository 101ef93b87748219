"""How the ranks' writers tell each other what they wrote: through the job's store, never through process groups.

A collective of a background thread would mix with those of training. Each saver has a connection of its own to the
store, and each save keys of its own; one process alone has a store in its memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardline.comm.store import connect_store
from shardline.errors import UserError

SLICE = timedelta(seconds=1)  # between looks at whether the wait was given up


class Telling:
    """Short JSON messages of one job. `connect` is called at the first one."""

    def __init__(self, world_size: int, prefix: str, connect: Callable[[], dist.Store] = connect_store) -> None:
        self._connect = connect if world_size > 1 else dist.HashStore
        self._prefix = prefix
        self._store: dist.Store | None = None

    @property
    def store(self) -> dist.Store:
        if self._store is None:
            self._store = dist.PrefixStore(self._prefix, self._connect())
        return self._store

    def tell(self, key: str, message: Any) -> None:
        self.store.set(key, json.dumps(message))

    def hear(self, key: str, deadline: float, given_up: Callable[[], None], late: str) -> Any:
        """What somebody tells, or told; a `UserError` with the text `late` after `deadline` (of `time.monotonic`).

        `given_up` is called every second, and raises to end the wait.
        """
        while True:
            given_up()
            try:
                self.store.wait([key], SLICE)
                return json.loads(self.store.get(key))
            except dist.DistStoreError:
                if time.monotonic() > deadline:
                    raise UserError(late) from None

    def forget(self, key: str) -> None:
        self.store.delete_key(key)
