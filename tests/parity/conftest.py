"""One pool of workers and one set of references for the whole session."""

from collections.abc import Iterator

import pytest

from tests.parity.harness import Harness
from tests.parity.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def harness(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(pool, tmp_path_factory.mktemp("parity"))
