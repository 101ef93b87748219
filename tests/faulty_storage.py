"""File systems in memory that fail as asked: at the n-th write, by losing bytes, or always."""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import register_implementation

PROTOCOL = "faulty"


class Faults:
    """What goes wrong; `writes` counts the writes so far."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.writes, self.fail_at, self.cut_at, self.unreachable = 0, set[int](), set[int](), False
        self.log: list[tuple[str, str]] = []  # (what, path), in order
        self.before_write: Any = None


faults = Faults()


class FaultyFile(MemoryFile):
    def write(self, data: Any) -> int:
        faults.writes += 1
        if faults.before_write is not None:
            faults.before_write(self.path)
        if faults.writes in faults.fail_at:
            raise OSError(28, "No space left on the other side")
        if faults.writes in faults.cut_at:
            return super().write(bytes(data)[:-1])
        return super().write(data)


class FaultyFileSystem(MemoryFileSystem):
    protocol = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace(f"{PROTOCOL}://", "memory://", 1))

    def _reach(self) -> None:
        if faults.unreachable:
            raise ConnectionError("no route to the other side")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._reach()
        return super().ls(path, detail, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._reach()
        if "w" not in mode:
            return super()._open(path, mode, **options)
        faults.log.append(("write", path))
        file = FaultyFile(self, path)
        self.store[path] = file
        return file

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._reach()
        faults.log.append(("remove", path))
        super().rm(path, recursive, maxdepth)


def register() -> None:
    register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)


def clear() -> None:
    FaultyFileSystem.store.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    faults.reset()
