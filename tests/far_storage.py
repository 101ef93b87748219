"""far:///path: folders of this machine that pass for another one's, for tests with several processes."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import register_implementation


class FarFileSystem(LocalFileSystem):
    protocol = "far"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).replace("far://", "file://", 1))


register_implementation("far", FarFileSystem, clobber=True)
