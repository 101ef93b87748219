"""Errors a user can cause: the command line prints their message and exits with code 2, without a traceback."""


class UserError(Exception):
    """Something the user gave cannot be used; the message says what, and what would work."""


class ConfigError(UserError):
    """A config key, value or file that cannot be used."""
