"""Prompt files: one prompt a line, or JSON lines with `turns`."""

from __future__ import annotations

import json
from pathlib import Path

Conversation = tuple[str, ...]
"""User turns of one conversation, in order."""


class PromptsError(ValueError):
    """A prompts file cannot be used; the message names the file and line."""


def read_prompts(path: Path) -> list[Conversation]:
    """Read conversations from `path`; see `read_numbered_prompts`."""
    return [conversation for _, conversation in read_numbered_prompts(path)]


def read_numbered_prompts(path: Path) -> list[tuple[int, Conversation]]:
    """Read conversations from `path`, each with the number of its line.

    A file whose first line that is not blank starts with `{` holds JSON lines, each an object
    with `turns`, a list of user turns; any other file holds one prompt a line. Blank lines are
    skipped.

    Raises:
        PromptsError: the file cannot be read, is empty, or a line is malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"cannot read {path}: {error}") from error
    lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), start=1)]
    lines = [(i, line) for i, line in lines if line]
    if not lines:
        raise PromptsError(f"{path} has no prompts: expected one a line, or JSON lines with turns")
    if lines[0][1].startswith("{"):
        return [(i, _turns(line, f"{path}, line {i}")) for i, line in lines]
    return [(i, (line,)) for i, line in lines]


def _turns(line: str, place: str) -> Conversation:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PromptsError(
            f'{place}: expected {{"turns": ["first user turn", ...]}}, got {line[:80]!r}'
        ) from error
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(t, str) and t.strip() for t in turns)
    ):
        raise PromptsError(f"{place}: turns must be a list of texts that are not empty: {turns!r}")
    return tuple(turns)
