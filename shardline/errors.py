"""Errors a user can cause: the command line prints their message and exits with code 2, without a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Something the user gave cannot be used; the message says what, and what would work."""


class ConfigError(UserError):
    """A config key, value or file that cannot be used."""


@contextlib.contextmanager
def blame(key: str) -> Iterator[None]:
    """Put the config key that is to blame in front of an error's message."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error
