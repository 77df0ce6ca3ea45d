"""Hidden states of the target at the answers of all texts, on disk in shards.

Those that an engine kept when it made a text are taken; others come from a forward pass.

A shard is a safetensors file of about 64 MB; it is renamed into place when whole, and holds a hash
of its texts, so a run that was killed, or that finds more texts than an earlier one, computes only
the shards that are missing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medusa_plugin.training.target import Target, batches_by_length, require_finite
from medusa_plugin.training.texts import Text, TrainingError

SHARD_BYTES = 64 << 20
_SPARE_BYTES = 256 << 20
"""Of disk, left for checkpoints and the report."""

Progress = Callable[[int, int], None]
"""Takes tokens done, and all there are to do."""


@dataclass(frozen=True)
class Shard:
    """A whole shard on disk."""

    path: Path
    rows: int
    lengths: torch.Tensor
    """int64 `[answers]`, rows of each."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 `[rows, hidden_size]` states and int64 `[rows]` the tokens chosen from them."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor("hidden"), file.get_tensor("tokens").long()


def plan(texts: Sequence[Text], hidden_size: int, shard_bytes: int = SHARD_BYTES) -> list[range]:
    """Which texts go into which shard, in their order."""
    most = max(1, shard_bytes // (2 * hidden_size))
    shards, first, rows = [], 0, 0
    for i, text in enumerate(texts):
        if rows and rows + text.rows > most:
            shards.append(range(first, i))
            first, rows = i, 0
        rows += text.rows
    if rows:
        shards.append(range(first, len(texts)))
    return shards


def extract(
    target: Target,
    texts: Sequence[Text],
    directory: Path,
    progress: Progress | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[Shard]:
    """Make the shards of `texts` that are not yet there; remove others of an earlier run.

    Args:
        target: the model.
        texts: longer ones than the model's context are cut, or left out where no answer is left.
        directory: of the shards of these texts alone; made.
        progress: told of tokens, also of those in shards that were there.
        shard_bytes: of hidden states in a shard, about.

    Returns:
        The shards in the order of the texts.

    Raises:
        TrainingError: no answer is within the context, the disk has too little room, or a hidden
            state is not finite.
    """
    texts = [cut for text in texts if (cut := text.cut(target.max_tokens)).rows]
    if not texts:
        raise TrainingError(
            f"every answer begins beyond the model's context of {target.max_tokens} tokens: give "
            "shorter conversations"
        )
    hidden_size = int(target.config.hidden_size)
    parts = plan(texts, hidden_size, shard_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"{i:05d}.safetensors" for i in range(len(parts))]
    hashes = [_hash(target, [texts[i] for i in part]) for part in parts]
    for file in directory.iterdir():
        if file.name not in names:
            file.unlink()
    found = [_open(directory / name, hash_) for name, hash_ in zip(names, hashes, strict=True)]
    missing = sum(
        bytes_needed([texts[i] for i in part], hidden_size)
        for part, shard in zip(parts, found, strict=True)
        if shard is None
    )
    require_room(directory, missing)
    done, total = 0, sum(len(text.token_ids) for text in texts)
    shards = []
    for part, name, hash_, shard in zip(parts, names, hashes, found, strict=True):
        part_texts = [texts[i] for i in part]
        if shard is None:
            report = None if progress is None else (lambda n, d=done: progress(d + n, total))
            _write(target, part_texts, directory / name, hash_, report)
            shard = _open(directory / name, hash_)
            assert shard is not None
        done += sum(len(text.token_ids) for text in part_texts)
        if progress is not None:
            progress(done, total)
        shards.append(shard)
    return shards


def bytes_needed(texts: Sequence[Text], hidden_size: int) -> int:
    """On disk, for the hidden states of `texts`."""
    return sum(text.rows for text in texts) * (2 * hidden_size + 4)


def require_room(directory: Path, needed: int) -> None:
    """Raise `TrainingError` where the disk of `directory` lacks room for `needed` bytes."""
    free = shutil.disk_usage(directory).free
    if needed and needed + _SPARE_BYTES > free:
        raise TrainingError(
            f"hidden states need {needed / 1e9:.2f} GB in {directory}, where {free / 1e9:.2f} GB "
            "are free: give another --out, or fewer --tokens"
        )


def _hash(target: Target, texts: Sequence[Text]) -> str:
    digest = hashlib.sha256(f"{target.fingerprint} {target.dtype}".encode())
    for text in texts:
        digest.update(text.digest())
    return digest.hexdigest()


def _open(path: Path, expected: str) -> Shard | None:
    """The shard at `path`; None where it is missing, damaged or of other texts."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("texts") != expected:
                return None
            lengths = file.get_tensor("lengths").long()
    except (SafetensorError, OSError):
        return None
    return Shard(path, int(lengths.sum()), lengths)


def _write(
    target: Target,
    texts: Sequence[Text],
    path: Path,
    hash_: str,
    progress: Callable[[int], None] | None,
) -> None:
    states = {
        i: require_finite(text.hidden.read()[: text.rows], "the engine")
        for i, text in enumerate(texts)
        if text.hidden is not None
    }
    done = sum(len(texts[i].token_ids) for i in states)
    missing = [i for i in range(len(texts)) if i not in states]
    for batch in batches_by_length([texts[i] for i in missing]):
        chosen = [missing[i] for i in batch]
        made = target.hidden_states([texts[i] for i in chosen])
        for i, hidden in zip(chosen, made, strict=True):
            states[i] = hidden.to("cpu", torch.bfloat16)
            done += len(texts[i].token_ids)
        if progress is not None:
            progress(done)
    answers = [(text, start, stop) for text in texts for start, stop in text.answers]
    tokens = [token for text, start, stop in answers for token in text.token_ids[start:stop]]
    tensors = {
        "hidden": torch.cat([states[i] for i in range(len(texts))]),
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "lengths": torch.tensor([stop - start for _, start, stop in answers], dtype=torch.int32),
    }
    partial = path.with_suffix(".part")
    save_file(tensors, partial, metadata={"format": "pt", "texts": hash_})
    partial.replace(path)
