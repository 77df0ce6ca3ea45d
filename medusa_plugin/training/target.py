"""The target model outside vLLM: its hidden states, its embedding and its language-model head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.training.texts import Text, TrainingError

BATCH_TOKENS = 2048
"""Of one forward pass, padding included."""


class Target:
    """A frozen decoder, loaded by transformers.

    Args:
        model: directory or name.
        dtype: to compute in.
        device: where to.

    Raises:
        TrainingError: transformers is missing or cannot load the model as a causal decoder.
    """

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise TrainingError(
                "training needs transformers: pip install 'vllm-medusa[train]'"
            ) from error
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        except (OSError, ValueError) as error:
            raise TrainingError(f"cannot load {model} as a decoder: {error}") from error
        self._model = loaded.to(device).eval().requires_grad_(False)
        self._body = self._model.base_model
        self.device = device
        self.dtype = dtype
        self.config: Any = self._model.config.get_text_config()
        self.fingerprint = fingerprint(model, self.config)

    @property
    def max_tokens(self) -> int:
        """Of a text."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 30)

    def spec(self) -> TargetSpec:
        """What heads have to know of the target."""
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if head is None or embedding is None:
            raise TrainingError("the model has no output or input embedding of one piece")
        return TargetSpec(
            hidden_size=int(head.weight.shape[1]),
            vocab_size=int(self.config.vocab_size),
            lm_head=head.weight.detach(),
            dtype=self.dtype,
            device=self.device,
            embedding=embedding.weight.detach(),
        )

    @torch.inference_mode()
    def hidden_states(self, texts: Sequence[Text]) -> list[torch.Tensor]:
        """For each text `[rows, hidden_size]`: the state, after the final norm, from which each
        answer token was chosen.

        Raises:
            TrainingError: a state is not finite.
        """
        # Filled up on the right: a causal decoder's tokens don't see what comes after them.
        longest = max(len(text.token_ids) for text in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        for i, text in enumerate(texts):
            ids[i, : len(text.token_ids)] = torch.tensor(text.token_ids)
        hidden = self._body(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        kept = [
            torch.cat([states[start - 1 : stop - 1] for start, stop in text.answers])
            for states, text in zip(hidden, texts, strict=True)
        ]
        return [require_finite(states, f"the model in {self.dtype}") for states in kept]


def require_finite(states: torch.Tensor, source: str) -> torch.Tensor:
    """The same states; raises `TrainingError` where one is not finite."""
    if not bool(torch.isfinite(states).all()):
        raise TrainingError(f"{source} gives NaN or infinity as hidden states: use float32")
    return states


def batches_by_length(texts: Sequence[Text], batch_tokens: int = BATCH_TOKENS) -> list[list[int]]:
    """Places of texts of similar length, longest first, with few tokens of padding."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i].token_ids))
    batches: list[list[int]] = []
    room = width = 0
    for i in order:
        if room < width or not batches:
            # The first text of a batch is its longest and says how wide the batch is.
            width = len(texts[i].token_ids)
            room = max(batch_tokens, width)
            batches.append([])
        batches[-1].append(i)
        room -= width
    return batches


def fingerprint(model: str, config: Any) -> str:
    """Of a model: its config, and names and sizes of the weights of a local one."""
    digest = hashlib.sha256(str(config.to_json_string()).encode())
    directory = Path(model)
    if directory.is_dir():
        for file in sorted(directory.glob("*.safetensors")):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:16]
