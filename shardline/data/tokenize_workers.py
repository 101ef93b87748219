"""Worker processes that tokenize: fresh interpreters that run `main`, each served by a thread of the caller.

A process pool of the standard library would import the caller's script again, which would then need a `__main__` guard.
It would also outlive a caller that is killed, and hide the exit code of a worker that dies. A worker uses one thread;
one worker per core scales, which threads of one process do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
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

from shardline.data.chunks import Chunk, Window
from shardline.data.formats.base import Format, Tokens
from shardline.data.token_store import END_TYPE, join_documents, token_type
from shardline.data.tokenizer import Pieces, Tokenizer
from shardline.errors import UserError
from shardline.words import sized

CHUNK_SECONDS, LEAST_SPEED = 300.0, 20_000.0  # a chunk takes a few seconds at most; bytes per second of a large one
CHUNK_MEMORY = 2 << 30  # in addition to 256 times its size
SEAM = 256  # characters on each side of a cut on whose tokens both pieces should agree
# Ctrl-C reaches the whole process group; the caller handles it and ends the workers
START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from shardline.data.tokenize_workers import main; "
)


@dataclass
class Encoded:
    """A tokenized chunk: ids, where documents end in them, and how many documents were empty and left out.

    `trained` says of each token whether it is trained; None where all are. `seams` are hashes of the tokens around the
    beginning and the end of a piece of a large document, which should equal those of the neighboring pieces.
    """

    tokens: np.ndarray
    ends: np.ndarray
    empty: int
    size: float
    trained: np.ndarray | None = None
    seams: tuple[bytes, bytes] = (b"", b"")


class Encoder(Protocol):
    """Turns a chunk into tokens; it is sent to the worker processes."""

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
        if not (chunk.opens and chunk.closes):
            return self._piece(chunk, *texts)
        kept = [text for text in texts if text.strip()]
        arrays = self.tokenizer.encode_arrays(kept) if kept else []
        tokens, ends = join_documents(arrays, self.tokenizer)
        return Encoded(tokens, ends, len(texts) - len(kept), chunk.size)

    def _piece(self, chunk: Chunk, window: Window) -> Encoded:
        """The tokens that begin in a piece of a large document, tokenized with the text around it.

        They are those of the whole document, unless they depend on text that is farther away than this context.
        """
        found = self.tokenizer.encode_pieces(window.text)
        first = -1 if chunk.opens else window.first
        last = len(window.text) + 1 if chunk.closes else window.last
        here = (found.starts >= first) & (found.starts < last)
        tokens, ends = join_documents([found.ids[here]], self.tokenizer, chunk.opens, chunk.closes)
        seams = (_seam(found, window.first), _seam(found, window.last))
        return Encoded(tokens, ends, 0, chunk.size, seams=seams)


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


def _seam(found: Pieces, place: int) -> bytes:
    """A hash of the tokens that begin near a place, and of where they begin."""
    near = np.abs(found.starts - place) < SEAM
    return hashlib.blake2b(np.stack([found.ids[near], found.starts[near] - place]).tobytes(), digest_size=8).digest()


def encode_all(chunks: Iterable[Chunk], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Tokenize with `workers` processes; results come in the order of the chunks, a few per worker at a time."""
    local = threading.local()
    started: list[_Worker] = []

    def run(chunk: Chunk) -> Encoded:
        if not hasattr(local, "worker"):
            local.worker = _Worker(f"tokenizing with {encoder.tokenizer.name!r}")
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

    def __init__(self, work: str) -> None:
        self.work = work
        self.pipe, theirs = multiprocessing.Pipe()
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        library = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        environment = os.environ | library | {"PYTHONPATH": os.pathsep.join(paths)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{START}main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a worker prints must not mix with the caller's output
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def send(self, value: Any) -> int:
        """Send an object; returns its size in bytes."""
        content = pickle.dumps(value)
        with self._alive():
            self.pipe.send_bytes(content)
        return len(content)

    def encode(self, chunk: Chunk) -> Encoded:
        size = self.send(chunk)
        seconds = CHUNK_SECONDS + size / LEAST_SPEED
        with self._alive():
            if not self.pipe.poll(seconds):
                self.process.kill()
                raise UserError(f"{self.work} took more than {seconds:.0f} s for {sized(size)} of text")
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
            if code == -signal.SIGABRT:  # how the library ends a process that gets no memory
                raise UserError(_too_much(self.work)) from None
            raise RuntimeError(f"a tokenizing process died (exit code {code}); is there enough memory?") from None


def _too_much(work: str) -> str:
    return f"{work} took more than {sized(CHUNK_MEMORY)} of memory for a chunk"


def main(descriptor: int) -> None:
    """The worker: an encoder first, then chunks until the pipe closes, which also happens if the caller dies."""
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError, ConnectionError):
        encoder = pipe.recv()
        while True:
            content = pipe.recv_bytes()
            chunk = pickle.loads(content)
            try:
                with memory_limit(CHUNK_MEMORY + 256 * len(content)):
                    answer: Any = encoder.encode(chunk)
            except UserError as error:
                answer = UserError(*error.args)
            except MemoryError:
                answer = UserError(_too_much(f"tokenizing with {encoder.tokenizer.name!r}"))
            except Exception as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(answer)


@contextlib.contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Limit this process to `extra` bytes more than it has: a tokenizer or a template may ask for any amount of memory.

    Beyond the limit Python raises MemoryError, and the tokenizers library aborts the process.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    wanted = has + extra
    if before == resource.RLIM_INFINITY or wanted < before:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
