"""How much of a checkpoint's files is read."""

import contextlib
from collections.abc import Iterator

import pytest

from shardline.checkpoint.reader import VerifiedFile


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The sizes of all blocks that this process reads inside."""
    sizes: list[int] = []
    fetch = VerifiedFile._fetch

    def counted(self: VerifiedFile, index: int, into: memoryview) -> None:
        sizes.append(len(into))
        fetch(self, index, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerifiedFile, "_fetch", counted)
        yield sizes
