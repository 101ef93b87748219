"""Worker processes that tokenize: fresh interpreters that run `main`, each served by a thread of the caller.

A process pool of the standard library would import the caller's script again, which would then need a `__main__` guard,
would outlive a caller that is killed and hide the exit code of a worker that dies. A worker uses one thread; there are
as many workers as cores, which scales where threads of one process do not.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardline.data.chunks import Chunk
from shardline.data.formats.base import Format, Tokens
from shardline.data.token_store import END_TYPE, join_documents, token_type
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError

# Ctrl-C reaches the whole process group; the caller handles it and ends the workers
START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from shardline.data.tokenize_workers import main; "
)


@dataclass
class Encoded:
    """A chunk in tokens: ids, where documents end in them, and how many documents were empty and left out.

    `trained` says of each token whether it is trained; None where all are.
    """

    tokens: np.ndarray
    ends: np.ndarray
    empty: int
    size: float
    trained: np.ndarray | None = None


class Encoder(Protocol):
    """Turns a chunk into tokens; it travels to the worker processes."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def mark(self) -> str: ...  # what it does, for the store's manifest; empty for plain text

    def encode(self, chunk: Chunk) -> Encoded: ...


@dataclass(frozen=True)
class TextEncoder:
    """Documents are texts: `[bos] tokens [eos]`, all of it trained."""

    tokenizer: Tokenizer
    mark: str = ""

    def encode(self, chunk: Chunk) -> Encoded:
        texts = chunk.documents()
        if chunk.opens and chunk.closes:
            kept = [text for text in texts if text.strip()]
        else:
            kept = texts  # pieces of one large document: white space between them belongs to it
        arrays = self.tokenizer.encode_arrays(kept) if kept else []
        tokens, ends = join_documents(arrays, self.tokenizer, chunk.opens, chunk.closes)
        return Encoded(tokens, ends, len(texts) - len(kept), chunk.size)


@dataclass(frozen=True)
class RecordEncoder:
    """Documents are records of a format; a pair of answers is two documents, one after the other."""

    tokenizer: Tokenizer
    format: Format
    mark: str

    def encode(self, chunk: Chunk) -> Encoded:
        records = chunk.documents()
        found = [self.rows(where, record) for where, record in records]
        rows = [row for some in found for row in some if len(row.ids)]
        dtype = token_type(self.tokenizer)
        tokens = np.concatenate([row.ids for row in rows]).astype(dtype) if rows else np.empty(0, dtype)
        trained = np.concatenate([row.trained for row in rows]) if rows else np.empty(0, bool)
        ends = np.cumsum([len(row.ids) for row in rows], dtype=END_TYPE)
        return Encoded(tokens, ends, sum(not some for some in found), chunk.size, trained)

    def rows(self, where: str, record: Any) -> list[Tokens]:
        """The rows of a record; an error names its place."""
        try:
            return self.format.rows(record)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


def encode_all(chunks: Iterable[Chunk], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Tokenize with `workers` processes; results come in the order of the chunks, a few per worker at a time."""
    local = threading.local()
    started: list[_Worker] = []

    def run(chunk: Chunk) -> Encoded:
        if not hasattr(local, "worker"):
            local.worker = _Worker()
            started.append(local.worker)
            local.worker.send(encoder)
        return local.worker.encode(chunk)

    chunks = iter(chunks)
    waiting: deque[Future[Encoded]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        waiting.extend(pool.submit(run, chunk) for chunk in itertools.islice(chunks, 3 * workers))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(run, chunk) for chunk in itertools.islice(chunks, 1))
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in started:
            worker.process.kill()  # nobody waits for its result, and its thread ends with it
        pool.shutdown(wait=True)
        for worker in started:
            worker.end()


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{START}main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a worker prints is no output of the caller
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def send(self, value: Any) -> None:
        with self._alive():
            self.pipe.send(value)

    def encode(self, chunk: Chunk) -> Encoded:
        self.send(chunk)
        with self._alive():
            result = self.pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            code = self.process.wait()
            raise RuntimeError(f"a tokenizing process died (exit code {code}); is there enough memory?") from None


def main(descriptor: int) -> None:
    """The worker: an encoder first, then chunks until the pipe closes, which also happens if the caller dies."""
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError, ConnectionError):
        encoder = pipe.recv()
        while True:
            chunk = pipe.recv()
            try:
                answer: Any = encoder.encode(chunk)
            except UserError as error:
                answer = UserError(*error.args)
            except Exception as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(answer)
