"""Keep the plugin's log out of a command that shows the same things itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only() -> Iterator[None]:
    """Hold back the plugin's warnings; the level before comes back, for whoever calls a command."""
    logger = logging.getLogger("vllm.medusa")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
