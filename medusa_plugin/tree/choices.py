"""Read the paths of a static tree in every spelling that serving projects use.

All mean the same: a path lists the candidate rank at each depth, and the root is not listed. Only
the order differs, and it carries no meaning. Where others treat a list otherwise:

- TensorRT-LLM adds the parents that a list leaves out. Its documented spelling for Triton,
  `{0, 0, 0}, {0, 1}`, relies on that and is read so; in a list of lists a missing parent is an
  error here, since it is far more often a slip.
- RTP-LLM drops paths of more than 3 ranks in silence; here they count.
"""

from __future__ import annotations

import ast
import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from medusa_plugin.tree.token_tree import MAX_ROWS, Path, TreeError

EXAMPLE = "[[0], [1], [0, 0]]"

MAX_TEXT_LENGTH = 1_000_000
"""Characters of a text or file; 63 paths need a hundredth of it, a model's config.json less too."""

_LIST_KEYS = (
    "medusa_choices",  # FasterDecoding, TensorRT-LLM's decoding config, RTP-LLM's section
    "speculative_token_tree",  # vLLM before 0.32
)
_SECTION_KEYS = (
    "medusa_config",  # RTP-LLM's config.json
    "speculative_config",  # TensorRT-LLM's LLM options
)

_BRACES = re.compile(r"\s*\{\s*-?\d")
"""How Triton's spelling begins; the first key of a JSON object would be quoted."""


def parse_choices(choices: Any) -> list[Path]:
    """Paths of a static tree, checked only for being lists of integers.

    Args:
        choices: a list of lists or tuples; its text as JSON, as a Python literal, or in braces as
            for Triton; a JSON object that holds it under a key other projects use; or the path of
            a UTF-8 file with such a text.

    Raises:
        TreeError: names what was got in place of these, with an example.
    """
    source = "the tree"
    if not isinstance(choices, str):
        return _paths(choices, source)
    if not choices.strip():
        raise TreeError(f"the tree is an empty text: give a list of paths, e.g. {EXAMPLE}")
    if choices.lstrip().startswith(("[", "(", "{")):
        return _parse_text(choices, source)
    source = f"tree file {choices[:300]}"
    try:
        with open(choices, encoding="utf-8-sig") as file:
            text = file.read(MAX_TEXT_LENGTH + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TreeError(
            f"{source} cannot be read: {reason}; a tree is 'dynamic', 'static', a list of paths, "
            f"e.g. {EXAMPLE}, or a file that holds one"
        ) from error
    return _parse_text(text, source)


def _parse_text(text: str, source: str) -> list[Path]:
    if len(text) > MAX_TEXT_LENGTH:
        raise TreeError(
            f"{source} is a text of more than {MAX_TEXT_LENGTH} characters: a list of up to "
            f"{MAX_ROWS - 1} paths is far shorter, e.g. {EXAMPLE}"
        )
    if _BRACES.match(text):
        listed = "[" + text.replace("{", "[").replace("}", "]") + "]"
        return _with_parents(_paths(_parse_literal(listed, source, "{0, 0}, {1}"), source))
    return _paths(_parse_literal(text, source, EXAMPLE), source)


def _parse_literal(text: str, source: str, example: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise TreeError(f"{source} is nested too deeply to read, expected {example}") from error
    except ValueError as not_json:
        reason: Exception = not_json
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        if "(" in text:
            reason = error
    raise TreeError(
        f"{source} is neither JSON nor a list in Python's spelling, e.g. {example}: {reason}; "
        f"got {reprlib.repr(text)}"
    ) from reason


def _paths(listed: Any, source: str) -> list[Path]:
    if isinstance(listed, Mapping):
        return _paths_of_object(listed, source, (*_LIST_KEYS, *_SECTION_KEYS))
    if not isinstance(listed, (list, tuple)):
        raise TreeError(
            f"{source} is not a list of paths, e.g. {EXAMPLE}; got {reprlib.repr(listed)}"
        )
    for path in listed:
        if not isinstance(path, (list, tuple)) or not all(type(rank) is int for rank in path):
            raise TreeError(
                f"path {reprlib.repr(path)} of {source} is not a list of integers, e.g. [0, 0]"
            )
        if len(path) >= MAX_ROWS:
            raise TreeError(
                f"path {reprlib.repr(path)} of {source} is {len(path)} deep, at most "
                f"{MAX_ROWS - 1} fit"
            )
    return [tuple(path) for path in listed]


def _paths_of_object(
    holder: Mapping[Any, Any], source: str, expected: tuple[str, ...]
) -> list[Path]:
    found = [key for key in expected if key in holder]
    if len(found) != 1:
        raise TreeError(
            f"{source} is an object: expected exactly one of the keys {', '.join(expected)}, "
            f"with a list of paths, e.g. {EXAMPLE}; got {reprlib.repr(list(holder))}"
        )
    key, value = found[0], holder[found[0]]
    inner = f"{key!r} of {source}"
    if key in _SECTION_KEYS:
        if not isinstance(value, Mapping):
            raise TreeError(f"{inner} is not an object; got {reprlib.repr(value)}")
        return _paths_of_object(value, inner, _LIST_KEYS)
    if isinstance(value, str):
        return _parse_text(value, inner)
    if isinstance(value, Mapping):
        raise TreeError(f"{inner} is not a list of paths; got {reprlib.repr(value)}")
    return _paths(value, inner)


def _with_parents(paths: list[Path]) -> list[Path]:
    parents = {path[:depth] for path in paths for depth in range(1, len(path))}
    return paths + sorted(parents.difference(paths))
