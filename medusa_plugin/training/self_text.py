"""Text that a model makes up itself, kept as JSON lines: one conversation, or why not, a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_plugin.training.record import loop_start
from medusa_plugin.training.stored_states import StoredStates

MIN_PROMPT_WORDS = 3
MIN_ANSWER_TOKENS = 8

# A model left alone asks what it was tuned to be asked; beginnings widen that to what people ask.
OPENERS = (
    *("Write a", "Write an", "Write me", "Compose", "Draft an email", "Create a", "Design a"),
    *("Explain", "Explain how", "Explain why", "Describe", "Discuss", "Define", "Outline"),
    *("What is", "What are", "What would", "What's the difference between", "Which", "Who"),
    *("When", "Where", "Why", "Why do", "How", "How do I", "How can", "How many", "How does"),
    *("Can you", "Could you please", "Please", "Help me", "Tell me", "Give me", "Show me"),
    *("I need", "I have", "I want to", "I'm", "My", "We", "You are", "Imagine", "Pretend"),
    *("Act as", "Suppose", "If", "Given", "Given a", "Consider", "Let", "There are", "The"),
    *("Solve", "Calculate", "Find", "Prove", "Determine", "Implement", "Write a Python"),
    *("Write a function", "Write a program", "Write code", "Fix", "Debug", "In C++", "In Java"),
    *("Extract", "Summarize", "Rewrite", "Translate", "Edit", "Classify", "Identify", "Analyze"),
    *("Compare", "Evaluate", "List", "Name", "Provide", "Suggest", "Recommend", "Generate"),
    *("Is", "Is it", "Are there", "Do", "Does", "Should", "Based on", "Read the following", "In"),
)
"""Beginnings of a user's turn; every second prompt starts with one of them, in turn."""


def opener_of(index: int) -> str:
    """What the prompt of conversation `index` starts with; often nothing."""
    return OPENERS[index // 2 % len(OPENERS)] if index % 2 else ""


@dataclass(frozen=True)
class Conversation:
    """One made-up prompt and the model's own answer."""

    index: int
    """Seeds the prompt, so the same index gives the same prompt."""
    prompt: str
    prompt_ids: tuple[int, ...]
    """With the chat template, up to where the answer begins."""
    answer_ids: tuple[int, ...]
    """Cut where it starts to loop."""
    hidden: StoredStates | None = None
    """From which the answer's tokens were chosen; None where they were not kept."""


@dataclass(frozen=True)
class Made:
    """A conversation as the engine hands it over."""

    conversation: Conversation
    hidden: npt.NDArray[np.int16]
    """`[answer tokens, hidden_size]` the bits of the bf16 states that its tokens came from."""


@dataclass(frozen=True)
class Skipped:
    """An index of which no conversation came."""

    index: int
    reason: str


def reason_against(text: str, token_ids: Iterable[int]) -> str | None:
    """Why a made-up prompt is of no use; None where it is of use."""
    ids = np.fromiter(token_ids, np.int64)
    if len(text.split()) < MIN_PROMPT_WORDS:
        return "short prompt"
    return None if loop_start(ids) == len(ids) else "looping prompt"


class SelfTextFile:
    """Conversations on disk, appended one by one; what a killed run left behind is kept.

    Beside the JSON lines is a file of their hidden states, answer after answer.

    Args:
        path: of the JSON lines; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hidden_path = path.with_suffix(".hidden")
        self._drop_torn_line()
        self._drop_torn_states()

    def _drop_torn_line(self) -> None:
        """A kill may have left half a line at the end."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)

    def _drop_torn_states(self) -> None:
        """A kill may have left states at the end whose line was not written."""
        if not self._hidden_path.exists():
            return
        kept = [item.hidden for item in self if isinstance(item, Conversation)]
        end = max((states.end for states in kept if states is not None), default=0)
        if self._hidden_path.stat().st_size > end:
            os.truncate(self._hidden_path, end)

    def append(self, item: Made | Skipped) -> None:
        """Add a line; it is in the file when this returns."""
        if isinstance(item, Skipped):
            entry: dict[str, Any] = {"index": item.index, "skipped": item.reason}
        else:
            made = item.conversation
            entry = {
                "index": made.index,
                "prompt": made.prompt,
                "prompt_ids": list(made.prompt_ids),
                "answer_ids": list(made.answer_ids),
                "hidden_at": self._append_states(item.hidden),
                "hidden_size": item.hidden.shape[1],
            }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _append_states(self, hidden: npt.NDArray[np.int16]) -> int:
        """Returns where they start, in bytes."""
        with self._hidden_path.open("ab") as file:
            start = file.tell()
            file.write(hidden.tobytes())
        return start

    def _stored(self, entry: dict[str, Any], size: int) -> StoredStates | None:
        """What the file of hidden states, of `size` bytes, has for a line."""
        if "hidden_at" not in entry:
            return None
        shape = len(entry["answer_ids"]), entry["hidden_size"]
        states = StoredStates(self._hidden_path, entry["hidden_at"], *shape)
        return states if states.end <= size else None

    def __iter__(self) -> Iterator[Conversation | Skipped]:
        """All lines in the order in which they were written."""
        if not self.path.exists():
            return
        size = self._hidden_path.stat().st_size if self._hidden_path.exists() else 0
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                if "skipped" in entry:
                    yield Skipped(entry["index"], entry["skipped"])
                else:
                    yield Conversation(
                        entry["index"],
                        entry["prompt"],
                        tuple(entry["prompt_ids"]),
                        tuple(entry["answer_ids"]),
                        self._stored(entry, size),
                    )
