"""A fixture with which a project verifies its own checkpoint in its own tests.

In the project's conftest.py: `pytest_plugins = ["converters.pytest_plugin"]`; in a test:

    def test_my_checkpoint(verify_checkpoint):
        verify_checkpoint("my/checkpoint", prompts=["a text"], layers=True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def verify_checkpoint() -> Callable[..., Any]:
    """`verify_checkpoint(source, **options)` does what `converters.verify` does with the same options, fails the test
    where a bit differs, with the report, and returns the report."""
    import converters

    def check(source: Any, **options: Any) -> Any:
        report = converters.verify(source, **options)
        if not report.bit_equal:
            pytest.fail(f"{report.summary}\n{report}", pytrace=False)
        return report

    return check
