"""Texts to learn from: token ids, and which of them are a model's answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from medusa_plugin.training.self_text import Conversation, SelfTextFile
from medusa_plugin.training.stored_states import StoredStates

HELD_OUT_EVERY = 20
"""One conversation of so many is held out, whole."""
MIN_HELD_OUT = 2
"""One calibrates, one judges."""


class TrainingError(ValueError):
    """Heads cannot be trained; the message says why and what to do."""


@dataclass(frozen=True)
class Text:
    """One conversation as the target reads it."""

    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    """First token and end of each answer, ascending; a first token is never token 0."""
    hidden: StoredStates | None = field(default=None, compare=False)
    """Of all answers, where the engine that made them kept them."""

    def __post_init__(self) -> None:
        end = 1
        for start, stop in self.answers:
            if not end <= start < stop <= len(self.token_ids):
                raise ValueError(f"answers {self.answers} in {len(self.token_ids)} tokens")
            end = stop

    @property
    def rows(self) -> int:
        """Answer tokens, which is how many hidden states are kept."""
        return sum(stop - start for start, stop in self.answers)

    def cut(self, length: int) -> Text:
        """The first `length` tokens."""
        if len(self.token_ids) <= length:
            return self
        answers = [(start, min(stop, length)) for start, stop in self.answers if start < length]
        return Text(self.token_ids[:length], tuple(answers), self.hidden)

    def digest(self) -> bytes:
        """Equal for equal texts."""
        ids = np.array(self.token_ids, np.int64).tobytes()
        return hashlib.sha256(ids + repr(self.answers).encode()).digest()


def of_conversation(conversation: Conversation) -> Text:
    """The text of a prompt that the model made up, and its answer."""
    start = len(conversation.prompt_ids)
    ids = conversation.prompt_ids + conversation.answer_ids
    return Text(ids, ((start, len(ids)),), conversation.hidden)


def self_made_texts(files: Sequence[SelfTextFile]) -> list[Text]:
    """File after file, each in its order.

    Of several with the same prompt the first counts.
    """
    found: dict[str, Text] = {}
    for file in files:
        for item in file:
            if isinstance(item, Conversation):
                found.setdefault(" ".join(item.prompt.lower().split()), of_conversation(item))
    return list(found.values())


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and held-out ones: about every 20th, at least two.

    A hash of the first prompt decides, so the same prompt is never on both sides, and a text stays
    on its side when others are added.

    Raises:
        TrainingError: there are fewer than three texts with an answer and different prompts.
    """
    texts = [text for text in texts if text.rows]
    hashes = [_hash(text.token_ids[: text.answers[0][0]]) for text in texts]
    different = sorted(set(hashes))
    if len(different) <= MIN_HELD_OUT:
        raise TrainingError(
            f"{len(different)} conversations with an answer: training needs at least "
            f"{MIN_HELD_OUT + 1} of different prompts, {MIN_HELD_OUT} of them held out; give more "
            "prompts, or raise --tokens"
        )
    held_out = {value for value in different if value % HELD_OUT_EVERY == 0}
    if not MIN_HELD_OUT <= len(held_out) < len(different):
        held_out = set(different[:MIN_HELD_OUT])
    return (
        [text for text, value in zip(texts, hashes, strict=True) if value not in held_out],
        [text for text, value in zip(texts, hashes, strict=True) if value in held_out],
    )


def _hash(token_ids: Sequence[int]) -> int:
    digest = hashlib.sha256(np.array(token_ids, np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")
