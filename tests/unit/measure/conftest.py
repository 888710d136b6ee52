"""Fixtures of the tests of measuring."""

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory is as the allocator gives it: its pages are touched by who is timed."""
