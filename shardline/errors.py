"""Errors that a user can cause: the command line prints the message and exits with code 2, without a traceback."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """A user's input cannot be used; the message names it and what would work."""


class ConfigError(UserError):
    """A config key, value or file cannot be used."""


@contextlib.contextmanager
def blame(key: str) -> Iterator[None]:
    """Begin an error's message with the config key that caused it."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{key}: {error}") from error
