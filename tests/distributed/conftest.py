"""Process groups, started when a test first asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.harness import Ranks, started


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes of one gloo group."""
    yield from started(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes of one gloo group."""
    yield from started(4)
