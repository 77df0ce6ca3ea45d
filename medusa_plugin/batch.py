"""The batch of a step as the stages see it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medusa_plugin.request_options import RequestOptions
from medusa_plugin.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class StepRequest:
    """One request of the batch, as the target's forward pass saw it."""

    request_id: str
    tree: DraftTree
    """What was verified; just the root where nothing was drafted."""
    first_row: int
    """Row of the root in the step's logits and hidden states."""
    root_position: int
    """Position of the root token in the sequence, which is its index in the block table."""
    committed: npt.NDArray[np.int32]
    """Prompt and output token ids before this step (a view: valid during the step only)."""
    drafts_next: bool
    """False where the step's token is discarded (a prefill chunk): no new draft."""
    options: RequestOptions
    """What the request itself asked for."""
    typical_temperature: float | None
    """Temperature, above 0, of a request whose drafts are accepted by the typical rule, which is
    lossy; None: lossless acceptance."""
