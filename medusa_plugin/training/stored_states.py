"""Hidden states of one answer in a file of many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class StoredStates:
    """Where they are: bf16 rows, one an answer token, one after the other."""

    path: Path
    offset: int
    """In bytes."""
    rows: int
    hidden_size: int

    @property
    def end(self) -> int:
        """Offset of what follows, in bytes."""
        return self.offset + 2 * self.rows * self.hidden_size

    def read(self) -> torch.Tensor:
        """bf16 `[rows, hidden_size]`."""
        count = self.rows * self.hidden_size
        bits = np.fromfile(self.path, np.int16, count, offset=self.offset)
        return torch.from_numpy(bits).view(torch.bfloat16).view(self.rows, self.hidden_size)
