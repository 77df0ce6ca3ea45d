"""Fixtures of all tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """Messages of the plugin's logger, which vLLM does not pass on to the root."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.medusa"), Collect(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def process_stays_as_it_was() -> Iterator[None]:
    """Tests share a process: what one leaves behind changes what those after it see."""

    logger = logging.getLogger("vllm.medusa")
    before = logger.level
    yield
    assert logger.level == before, "a test left the log changed for the tests after it"
