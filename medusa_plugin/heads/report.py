"""What `medusa inspect` says of heads."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from medusa_plugin.heads.checkpoint import peek_heads
from medusa_plugin.heads.medusa_checkpoint import MedusaVariant
from medusa_plugin.heads.variant import Variant


class LoadReport(BaseModel):
    """Facts from the headers of a checkpoint; no weight is read."""

    model_config = ConfigDict(frozen=True)

    files: tuple[str, ...]
    format: str
    kind: str
    description: str
    num_heads: int
    num_layers: int
    """Residual blocks of each head, for plain and Hydra heads."""
    has_bias: bool
    hidden_size: int
    vocab_size: int | None
    """Of the target; None where the heads do not tell it."""
    lm_head: str
    dtypes: tuple[str, ...]
    num_parameters: int
    num_bytes: int
    draft_vocab_ranked: int
    """Most tokens that `draft_vocab_size` may be; 0 where the heads rank none."""
    reads_tokens: bool
    """Whether the target's input embedding is needed."""
    has_accuracies: bool
    tuned_draft_vocab_size: int | None
    """Of the tuning; None without one."""
    base_model: str
    """As the config says; nothing is decided by it."""
    other_tensors: int
    """Of the target, in the same files."""
    warnings: tuple[str, ...]


def inspect_heads(path: str | Path) -> LoadReport:
    """Look at heads as the engine would.

    Raises:
        HeadsError: they could not be loaded; says why.
    """
    info = peek_heads(path)
    variant = info.variant
    headers = [variant.source.headers[name] for name in variant.names]
    base_model = variant.source.config.get(
        "base_model_name_or_path", variant.source.config.get("base_model", "")
    )
    return LoadReport(
        files=tuple(dict.fromkeys(str(header.file) for header in headers)),
        format=variant.format,
        kind=info.kind,
        description=info.describe(),
        num_heads=info.num_heads,
        num_layers=variant.num_layers,
        has_bias=variant.has_bias,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        lm_head=_lm_head(variant),
        dtypes=tuple(sorted({header.dtype for header in headers})),
        num_parameters=sum(torch.Size(header.shape).numel() for header in headers),
        num_bytes=sum(header.num_bytes for header in headers),
        draft_vocab_ranked=info.draft_vocab_ranked,
        reads_tokens=variant.reads_tokens,
        has_accuracies=info.accuracies is not None,
        tuned_draft_vocab_size=info.tuning.draft_vocab_size if info.tuning else None,
        base_model=base_model if isinstance(base_model, str) else "",
        other_tensors=variant.source.others,
        warnings=variant.warnings,
    )


def _lm_head(variant: Variant) -> str:
    if isinstance(variant, MedusaVariant):
        if variant.shared_lm_head:
            return "one, shared by the heads"
        return "one per head" if variant.owns_lm_head else "the target's"
    if variant.table_rows is not None:
        return f"a table of {variant.table_rows} tokens"
    return "the target's" if variant.format == "medusa train" else "their own"
