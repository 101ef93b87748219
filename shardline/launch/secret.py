"""The secret of a job, which signs what its launchers and ranks write into the store.

One machine makes its own. Several machines get the same one, from SHARDLINE_JOB_SECRET or a file; without one the key
is known to everybody, and the first machine says so. It is never printed, saved or logged, and ranks get keys that are
derived from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from shardline.errors import UserError
from shardline.run.options import TrainOptions, node_range

VARIABLE = "SHARDLINE_JOB_SECRET"
FEWEST = 16  # characters


def job_secret(options: TrainOptions) -> bytes:
    """The secret of this job; empty for several machines that were given none."""
    given, file = os.environ.get(VARIABLE, ""), options.rdzv_secret_file
    if given and file:
        raise UserError(f"{VARIABLE} and --rdzv-secret-file are both set: use only one of them")
    where = f"--rdzv-secret-file {file}" if file else VARIABLE
    text = _read(file).strip() if file else given.strip()
    if not text and (file or given):
        raise UserError(f"{where} is empty: it takes a secret such as `openssl rand -hex 32` prints")
    if not text:
        return secrets.token_bytes(32) if node_range(options.nnodes)[1] == 1 else b""
    if len(text) < FEWEST:
        raise UserError(f"{where}: a secret has at least {FEWEST} characters, this one has {len(text)}")
    return text.encode()


def derived_secret(job: str) -> str:
    """The secret of a job that a scheduler started: made of its name and of a key that this user keeps in a file.

    The file lies in the home folder, which the machines of such a cluster share; the first job makes it. Where homes
    are not shared the keys differ, and the machines refuse each other.
    """
    file = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "shardline" / "job-key"
    try:
        if not file.exists():
            _make_key(file)
        key = _read(str(file), "the key of your jobs,")
    except OSError as error:
        raise UserError(
            f"the machines of this job need a secret, and no key can be kept in {file} ({error.strerror}):"
            f" export {VARIABLE}=$(openssl rand -hex 32) before srun"
        ) from error
    return hmac.new(key.strip().encode(), job.encode(), hashlib.sha256).hexdigest()


def _make_key(file: Path) -> None:
    """Write a new key; if several machines do so at the same time, one wins."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    mine = file.with_name(f".job-key-{secrets.token_hex(8)}")
    descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as stream:
            stream.write(secrets.token_hex(32) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(mine, file)  # never takes an existing name, not on network disks either
    finally:
        mine.unlink()


def _read(file: str, what: str = "--rdzv-secret-file") -> str:
    """The content of a file that nobody but its owner can read."""
    try:
        descriptor = os.open(os.path.expanduser(file), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{what} {file}: not a file")
            if found.st_mode & 0o077:
                mode = stat.S_IMODE(found.st_mode)
                raise UserError(f"{what} {file}: others can read it (mode {mode:04o}): chmod 600 {file}")
            return stream.read(1 << 16)
    except OSError as error:
        raise UserError(f"{what} {file} cannot be read: {error.strerror}") from error
