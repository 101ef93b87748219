"""Jobs that start ahead: while a test looks at its own, those of the next tests start, which is half of their time.

    run, jobs = fixtures(Job)          # Job(folder, *arguments, **options) starts a job, its close() ends it

    @job("raise", ranks=3)
    def test_something(run): ...       # gets Job(folder, "raise", ranks=3), under way

Few at a time: time-outs in these jobs are short, and must not come from a lack of cores. None where programs are
forked: they start in a moment.
"""

import contextlib

import pytest

from tests import prefork


def job(*arguments, **options):
    """The job that a test needs."""

    def mark(test):
        test.job = arguments, options
        return test

    return mark


def fixtures(make, ahead=1):
    """Two fixtures for a module: the job of a test, and those that were started and are not closed."""
    ahead = 0 if prefork.wanted() else ahead

    @pytest.fixture(scope="module")
    def jobs():
        started = {}
        yield started
        with contextlib.ExitStack() as stack:  # closes all, also where one of them fails
            for one in started.values():
                stack.callback(one.close)

    @pytest.fixture
    def run(request, jobs, tmp_path_factory):
        tests = [item for item in request.session.items if item.module is request.module and hasattr(item.obj, "job")]
        place = tests.index(request.node)
        for item in tests[place : place + 1 + ahead]:
            if item not in jobs:
                arguments, options = item.obj.job
                jobs[item] = make(tmp_path_factory.mktemp("job"), *arguments, **options)
        yield jobs[request.node]
        jobs.pop(request.node).close()

    return run, jobs
