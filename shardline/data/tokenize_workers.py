"""Processes that tokenize. Each is a fresh interpreter running this file's `main`, spoken to through its pipes.

Fresh interpreters, not forks: nothing of the caller is copied, and a user's script needs no `__main__` guard.
A worker uses one thread; there are as many workers as cores, which scales where threads of one process do not.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from shardline.data.chunks import Chunk
from shardline.data.token_store import join_documents
from shardline.data.tokenizer import Tokenizer
from shardline.errors import UserError

LENGTH = struct.Struct("<Q")


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
            local.worker = _Worker(tokenizer)
            started.append(local.worker)
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
            worker.end()
        pool.shutdown(wait=True)


class _Worker:
    def __init__(self, tokenizer: Tokenizer) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", "from shardline.data.tokenize_workers import main; main()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._send(tokenizer)

    def encode(self, chunk: Chunk) -> Encoded:
        self._send(chunk)
        try:
            result = _receive(self._pipe(self.process.stdout))
        except EOFError:
            self._died()
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self) -> None:
        """Kill it: what it still computes is wanted by nobody."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, value: Any) -> None:
        try:
            _send(self._pipe(self.process.stdin), value)
        except BrokenPipeError:
            self._died()

    def _died(self) -> None:
        raise RuntimeError(f"a tokenizing process ended by itself (exit code {self.process.wait()}; memory?)")

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def main() -> None:
    """The worker: a tokenizer first, then chunks until the pipe closes, which also happens if the caller dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, which ends the workers
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # anything that prints must not get into the answers
    try:
        tokenizer = _receive(source)
        while True:
            chunk = _receive(source)
            try:
                answer: Any = encode(chunk, tokenizer)
            except UserError as error:
                answer = UserError(*error.args)
            except Exception as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            _send(target, answer)
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    header = pipe.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    length = LENGTH.unpack(header)[0]
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)
