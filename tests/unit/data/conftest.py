"""What tests of data share."""

import pytest


@pytest.fixture
def said(capsys, caplog):
    """What was printed or logged since the last call: it goes to the log once a run has opened one."""
    caplog.set_level("INFO")

    def text():
        found = capsys.readouterr().err + caplog.text
        caplog.clear()
        return found

    return text
