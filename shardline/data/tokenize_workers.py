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
from typing import Any

import numpy as np

from shardline.data.chunks import Chunk
from shardline.data.token_store import join_documents
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError

# Ctrl-C reaches the whole process group; the caller handles it and ends the workers
START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from shardline.data.tokenize_workers import main; "
)


@dataclass
class Encoded:
    """A chunk in tokens: ids, where documents end in them, and how many documents were empty and left out."""

    tokens: np.ndarray
    ends: np.ndarray
    empty: int
    size: float


def encode(chunk: Chunk, tokenizer: Tokenizer) -> Encoded:
    texts = chunk.documents()
    if chunk.opens and chunk.closes:
        kept = [text for text in texts if text.strip()]
    else:
        kept = texts  # pieces of one large document: white space between them belongs to it
    arrays = tokenizer.encode_arrays(kept) if kept else []
    tokens, ends = join_documents(arrays, tokenizer, chunk.opens, chunk.closes)
    return Encoded(tokens, ends, len(texts) - len(kept), chunk.size)


def encode_all(chunks: Iterable[Chunk], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """Tokenize with `workers` processes; results come in the order of the chunks, a few per worker at a time."""
    local = threading.local()
    started: list[_Worker] = []

    def run(chunk: Chunk) -> Encoded:
        if not hasattr(local, "worker"):
            local.worker = _Worker()
            started.append(local.worker)
            local.worker.send(tokenizer)
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
    """The worker: a tokenizer first, then chunks until the pipe closes, which also happens if the caller dies."""
    with Connection(descriptor) as pipe, contextlib.suppress(EOFError, ConnectionError):
        tokenizer = pipe.recv()
        while True:
            chunk = pipe.recv()
            try:
                answer: Any = encode(chunk, tokenizer)
            except UserError as error:
                answer = UserError(*error.args)
            except Exception as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(answer)
