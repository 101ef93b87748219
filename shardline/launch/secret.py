"""The secret of a job, which signs what its launchers and ranks write into the store.

One machine makes its own. Several machines get the same one, from SHARDLINE_JOB_SECRET or a file; without one the key
is known to everybody, and the first machine says so. It is never printed, saved or logged, and ranks get keys that are
derived from it.
"""

from __future__ import annotations

import os
import secrets
import stat

from shardline.errors import UserError
from shardline.run.options import TrainOptions, node_range

VARIABLE = "SHARDLINE_JOB_SECRET"
FEWEST = 16  # characters


def job_secret(options: TrainOptions) -> bytes:
    """The secret of this job; empty for several machines that were given none."""
    given, file = os.environ.get(VARIABLE, ""), options.rdzv_secret_file
    if given and file:
        raise UserError(f"{VARIABLE} and --rdzv-secret-file are both given: give one of them")
    where = f"--rdzv-secret-file {file}" if file else VARIABLE
    text = _read(file).strip() if file else given.strip()
    if not text and (file or given):
        raise UserError(f"{where} is empty: it takes a secret such as `openssl rand -hex 32` prints")
    if not text:
        return secrets.token_bytes(32) if node_range(options.nnodes)[1] == 1 else b""
    if len(text) < FEWEST:
        raise UserError(f"{where}: a secret has at least {FEWEST} characters, this one has {len(text)}")
    return text.encode()


def _read(file: str) -> str:
    """The content of a file that nobody but its owner can read."""
    try:
        descriptor = os.open(os.path.expanduser(file), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"--rdzv-secret-file {file}: not a file")
            if found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise UserError(f"--rdzv-secret-file {file}: others can read it (mode {mode:04o}): chmod 600 {file}")
            return stream.read(1 << 16)
    except OSError as error:
        raise UserError(f"--rdzv-secret-file {file} cannot be read: {error.strerror}") from error
