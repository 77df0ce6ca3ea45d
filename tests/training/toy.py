"""A made-up target small enough to train heads for in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.training.hidden_states import Shard

VOCAB_SIZE, HIDDEN_SIZE = 48, 32


def target() -> TargetSpec:
    """Random embedding and lm head."""
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    return TargetSpec(
        HIDDEN_SIZE, VOCAB_SIZE, lm_head, torch.float32, torch.device("cpu"), embedding
    )


def shard(path: Path, answers: list[list[int]], hidden: torch.Tensor | None = None) -> Shard:
    """Answers with the hidden states given; by default each row is its token's embedding."""
    tokens = torch.tensor([token for answer in answers for token in answer])
    if hidden is None:
        hidden = target().embedding[tokens]  # type: ignore[index]
    lengths = torch.tensor([len(answer) for answer in answers])
    tensors = {
        "hidden": hidden.to(torch.bfloat16),
        "tokens": tokens.int(),
        "lengths": lengths.int(),
    }
    save_file(tensors, path)
    return Shard(path, len(tokens), lengths)


def successor(token: int) -> int:
    """The rule of the toy text: what follows a token."""
    return (5 * token + 7) % VOCAB_SIZE


def lawful_answers(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Answers that obey the rule, from random first tokens."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for first in torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist():
        answer = [first]
        while len(answer) < length:
            answer.append(successor(answer[-1]))
        answers.append(answer)
    return answers
