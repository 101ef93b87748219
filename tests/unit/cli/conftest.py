"""Commands run inside the process of the test."""

import pytest

from shardline.cli.main import main


@pytest.fixture
def run(capsys):
    """(exit code, what it printed, its errors) of a command."""

    def function(*words):
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return function
