"""`shardline data verify`: read a whole token store and compare every block with its checksum. Without torch."""

from __future__ import annotations

from pathlib import Path

from shardline.data.token_store import AGAIN, TokenStore, is_store
from shardline.errors import UserError
from shardline.storage.progress import Progress
from shardline.words import counted, sized, to_stderr


def verify(path: str) -> int:
    """Print the damaged files and byte ranges; return 2 if there are any."""
    if not is_store(path):
        unfinished = " (an unfinished one: continue `shardline data prepare`)" if _is_begun(path) else ""
        raise UserError(f"{path!r} holds no token store{unfinished}: a store has a store.json")
    store = TokenStore.open(path)
    sizes = [recorded["size"] for _, recorded in store.files()]
    with Progress("read", sum(sizes)) as progress:
        problems = store.find_damage(progress.advance)
    for problem in problems:
        to_stderr(str(problem))
    if problems:
        to_stderr(f"error: {path} cannot be relied on: {AGAIN}")
        return 2
    print(f"{path}: whole ({counted(len(sizes), 'file')}, {sized(sum(sizes))}, {store.tokens:,} tokens)")
    return 0


def _is_begun(path: str) -> bool:
    return (Path(path) / "prepare.json").is_file()
