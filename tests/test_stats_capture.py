"""What is captured, once more with native kernels: the same tests against the same references."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_capture import *  # noqa: F403


@pytest.fixture(autouse=True)
def _native(native_kernels: Any) -> None:
    """Every test of this module runs with them."""
