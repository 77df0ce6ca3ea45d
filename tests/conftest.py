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
