"""A user's own conversations as texts: every turn of the assistant is an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from medusa_plugin.training.texts import Text, TrainingError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Where a template marks what the model generates."""


def read_conversations(file: Path, tokenizer: Any) -> list[Text]:
    """The texts of a file of JSON lines, each an object with `messages`; the words are unchanged.

    Args:
        file: to read.
        tokenizer: of transformers, with a chat template.

    Raises:
        TrainingError: the file or a line cannot be used; names the line.
    """
    if tokenizer.chat_template is None:
        raise TrainingError(
            "--conversations needs a model with a chat template, which this tokenizer lacks"
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"cannot read {file}: {error}") from error
    texts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            messages = _messages(line, f"{file}, line {number}")
            try:
                texts.append(render(messages, tokenizer))
            except Exception as error:  # a template raises whatever it likes
                raise TrainingError(
                    f"{file}, line {number}: the chat template refuses it: {error}"
                ) from error
    return texts


def render(messages: list[dict[str, Any]], tokenizer: Any) -> Text:
    """A conversation by the chat template, with the assistant's turns marked.

    The template's own marks of generated text count where it has them. Otherwise a turn is what
    the conversation up to it has more than the conversation before it with the beginning of an
    answer; turns that the template changes once the conversation goes on are left unmarked.
    """
    if _GENERATION.search(tokenizer.chat_template):
        made = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [bool(mark) for mark in made["assistant_masks"]]
        return Text(tuple(made["input_ids"]), _runs(mask))
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not i:
            continue
        before = tokenizer.apply_chat_template(
            messages[:i], tokenize=False, add_generation_prompt=True
        )
        through = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if not whole.startswith(through):
            continue
        start = _common(before, through)
        # White space after the mark that ends a turn is the template's, not the model's.
        end = len(through.rstrip())
        for place, (first, _) in enumerate(places):
            if start <= first < end:
                mask[place] = True
                if ids[place] == tokenizer.eos_token_id:
                    break  # nor is anything else that a template puts after it
    return Text(tuple(ids), _runs(mask))


def _messages(line: str, place: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(line)["messages"]
        good = isinstance(messages, list) and all(
            isinstance(message["role"], str) and "content" in message for message in messages
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good or not messages:
        raise TrainingError(
            f'{place}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}, '
            f"got {line[:80]!r}"
        )
    checked: list[dict[str, Any]] = messages
    return checked


def _common(a: str, b: str) -> int:
    """Length of the longest common beginning."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def _runs(mask: list[bool]) -> tuple[tuple[int, int], ...]:
    """First and end of each run of marks; token 0 is chosen from no hidden state."""
    runs, start = [], None
    for i, mark in enumerate([*mask, False]):
        if mark and start is None:
            start = i
        elif not mark and start is not None:
            if max(start, 1) < i:
                runs.append((max(start, 1), i))
            start = None
    return tuple(runs)
