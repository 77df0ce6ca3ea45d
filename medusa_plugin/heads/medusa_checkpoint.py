"""Plain Medusa heads in a checkpoint of any layout.

The tensors' names decide: how many heads and layers, own or shared language-model head. The
config is only a hint, since public checkpoints often contradict their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from medusa_plugin.heads.base import HeadsError, TargetSpec
from medusa_plugin.heads.draft_vocab import checked_token_ids
from medusa_plugin.heads.files import CONFIG_FILE, INTEGERS
from medusa_plugin.heads.formats import LM_HEAD, Layout, TensorKey, detect_layout, is_scale
from medusa_plugin.heads.medusa import HeadWeights, MedusaHeads
from medusa_plugin.heads.source import Source
from medusa_plugin.heads.variant import Variant, counted, require_shape


@dataclass(frozen=True)
class _Structure:
    num_heads: int
    num_layers: int
    has_bias: bool
    own_lm_head: bool
    """One for each head."""

    def tensor_keys(self) -> Iterator[TensorKey]:
        """Of all heads; lazily, since a wild head number must not build a huge list."""
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                yield TensorKey(head, layer, "weight")
                if self.has_bias:
                    yield TensorKey(head, layer, "bias")
            if self.own_lm_head:
                yield TensorKey(head, LM_HEAD, "weight")


class MedusaVariant(Variant):
    """Residual blocks on the hidden state, then a language-model head.

    Args:
        source: with the heads' tensors.

    Raises:
        HeadsError: a tensor is unknown, missing or of a wrong shape or dtype; names it.
    """

    kind = "medusa"

    def __init__(self, source: Source) -> None:
        self.source = source
        self.layout = detect_layout(source.headers)
        self.format = self.layout.format
        names = _names_by_key(source, self.layout)
        self._shared_lm_head = _take_shared_lm_head(source, self.layout, names)
        """Name of one language-model head of the checkpoint that all its heads share."""
        structure = _infer(names)
        self._names = _ordered(source, self.layout, structure, names)
        self.num_heads = structure.num_heads
        self.num_layers = structure.num_layers
        self.has_bias = structure.has_bias
        self.owns_lm_head = structure.own_lm_head
        shared = [self._shared_lm_head] if self._shared_lm_head else []
        self.names = (*self._names.values(), *shared)
        source.require_floats(self.names)
        first = source.headers[next(iter(self._names.values()))]
        # A scalar has no width; the shapes are checked below.
        self.hidden_size = (first.shape or (0,))[-1]
        self._token_map = self._find("token_map")
        rows = self._check_shapes()
        self.vocab_size = self.table_size = rows
        if self._token_map is not None:
            header = source.headers[self._token_map]
            if header.dtype not in INTEGERS or len(header.shape) != 1:
                raise HeadsError(f"{header.file}: expected one int64 vector {self._token_map!r}")
            self.table_rows = header.shape[0]
            if rows is not None and rows <= self.table_rows:
                require_shape(source, self._token_map, (rows,))
                self.vocab_size = None
        scale = source.config.get("logit_scale", 1.0)
        if type(scale) not in (int, float) or not 0 < scale < float("inf"):
            raise HeadsError(
                f"{source.directory / CONFIG_FILE}: logit_scale is {scale!r}, expected a number "
                "above 0"
            )
        self.logit_scale = float(scale)
        self.warnings = tuple(self._compare_config())

    def describe(self) -> str:
        """See `Variant.describe`."""
        own = "own lm heads" if self.owns_lm_head else "shared lm head"
        if self._shared_lm_head:
            own = "one own lm head"
        return (
            f"{counted(self.num_heads, 'Medusa head')}, {counted(self.num_layers, 'layer')}, {own}"
        )

    def build(self, target: TargetSpec, draft_vocab: torch.Tensor | None) -> MedusaHeads:
        """See `Variant.build`."""
        lm_head = target.lm_head[: target.vocab_size].to(target.dtype)
        weights = self.read_weights(target)
        columns = draft_vocab
        if self._token_map is not None and weights.lm_heads is not None:
            assert draft_vocab is not None
            if self.vocab_size is None:  # the tables' rows are the map's tokens already
                columns = torch.arange(len(draft_vocab), device=draft_vocab.device)
        return MedusaHeads(
            weights, lm_head, draft_vocab, columns=columns, logit_scale=self.logit_scale
        )

    def ranking(self, vocab_size: int) -> torch.Tensor:
        """See `Variant.ranking`."""
        if self._token_map is None:
            return super().ranking(vocab_size)
        token_ids = self.source.read([self._token_map])[self._token_map]
        return checked_token_ids(token_ids, vocab_size, f"{self.source.file}: {self._token_map}")

    def read_weights(self, target: TargetSpec) -> HeadWeights:
        """The weights for `target`.

        Raises:
            HeadsError: a file is corrupt, or a tensor has NaN or infinite values.
        """
        read = dict(self.source.read_for(self.names, target))

        def stacked(layer: int, part: str) -> torch.Tensor:
            keys = (TensorKey(head, layer, part) for head in range(self.num_heads))
            return torch.stack([read.pop(self._names[key]) for key in keys]).to(target.device)

        layers = range(self.num_layers)
        lm_heads = None
        if self._shared_lm_head:
            lm_heads = read[self._shared_lm_head].to(target.device)
        elif self.owns_lm_head:
            lm_heads = stacked(LM_HEAD, "weight")
        return HeadWeights(
            num_heads=self.num_heads,
            weights=tuple(stacked(layer, "weight") for layer in layers),
            biases=tuple(stacked(layer, "bias") for layer in layers if self.has_bias),
            lm_heads=lm_heads,
        )

    def tensors(self) -> dict[TensorKey, str]:
        """Name in the files of each tensor."""
        return dict(self._names)

    @property
    def shared_lm_head(self) -> str | None:
        """Name of the one language-model head of the checkpoint that all its heads share."""
        return self._shared_lm_head

    @property
    def token_map(self) -> str | None:
        """Name of the draft vocabulary among the tensors."""
        return self._token_map

    def _find(self, extra: str) -> str | None:
        names = (name for name in self.layout.extras if name.rpartition(".")[2] == extra)
        return next((name for name in names if name in self.source.headers), None)

    def _check_shapes(self) -> int | None:
        """Check all; returns the rows of the heads' own tables."""
        hidden = self.hidden_size
        tables = [name for key, name in self._names.items() if key.layer == LM_HEAD]
        if self._shared_lm_head:
            tables.append(self._shared_lm_head)
        rows = (self.source.headers[tables[0]].shape or (0,))[0] if tables else None
        for key, name in self._names.items():
            if key.layer != LM_HEAD:
                expected = (hidden, hidden) if key.part == "weight" else (hidden,)
                require_shape(self.source, name, expected)
        for name in tables:
            require_shape(self.source, name, (rows or 0, hidden))
        return rows

    def _compare_config(self) -> Iterator[str]:
        config = self.source.config
        found: dict[str, object] = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "num_medusa_heads": self.num_heads,
            "num_medusa_layers": self.num_layers,
        }
        if self.format == "vLLM":
            found |= {
                "hidden_size": self.hidden_size,
                "num_heads": self.num_heads,
                "num_hidden_layers": self.num_layers,
                "medusa_fc_bias": self.has_bias,
            }
        yield from self.source.compare_config(**found)
        for key in ("medusa_config", "medusa"):
            nested = config.get(key)
            if isinstance(nested, Mapping):
                yield from self._compare_nested(nested, found)

    def _compare_nested(
        self, nested: Mapping[str, Any], found: Mapping[str, object]
    ) -> Iterator[str]:
        inner = Source(self.source.directory, self.source.headers, nested)
        yield from inner.compare_config(**found)


def _names_by_key(source: Source, layout: Layout) -> dict[TensorKey, list[str]]:
    """Names of each key; a numbered language-model head may stand under several numbers."""
    names: dict[TensorKey, list[str]] = {}
    for name, header in source.headers.items():
        key = None if is_scale(name, source.headers) else layout.parse(name)
        if key is None:
            continue
        before = names.setdefault(key, [])
        if before and key.layer != LM_HEAD:
            raise HeadsError(
                f"{header.file}: tensor {before[0]} is there twice, the second time as {name!r}"
            )
        before.append(name)
    return names


def _take_shared_lm_head(
    source: Source, layout: Layout, names: dict[TensorKey, list[str]]
) -> str | None:
    """Take the one language-model head of all heads out of `names`, if there is one."""
    for extra in layout.extras:
        if extra.endswith("lm_head.weight") and extra in source.headers:
            return extra
    tables = [key for key in names if key.layer == LM_HEAD]
    several = any(key.head > 0 for key in names)
    if layout.extras and several and tables == [TensorKey(0, LM_HEAD, "weight")]:
        return names.pop(tables[0])[0]
    return None


def _infer(names: Mapping[TensorKey, object]) -> _Structure:
    return _Structure(
        num_heads=1 + max((key.head for key in names), default=-1),
        num_layers=1 + max((key.layer for key in names if key.layer != LM_HEAD), default=-1),
        has_bias=any(key.part == "bias" for key in names),
        own_lm_head=any(key.layer == LM_HEAD for key in names),
    )


def _ordered(
    source: Source,
    layout: Layout,
    structure: _Structure,
    names: Mapping[TensorKey, list[str]],
) -> dict[TensorKey, str]:
    """Name of each tensor: every head must have every layer, and nothing else."""
    described = f"{structure.num_heads} heads of {structure.num_layers} layers"
    ordered: dict[TensorKey, str] = {}
    for key in structure.tensor_keys():
        expected = layout.name(key, structure.num_layers)
        found = [name for name in names.get(key, ()) if _same_numbers(layout, name, expected)]
        if not found:
            raise HeadsError(f"{source.file}: tensor {expected} is missing from {described}")
        if len(found) > 1:
            raise HeadsError(
                f"{source.file}: tensor {found[0]} is there twice, the second time as {found[1]!r}"
            )
        ordered[key] = found[0]
    known = set(ordered.values())
    for some in names.values():
        for name in some:
            if name not in known:
                raise HeadsError(f"{source.file}: tensor {name} does not belong to {described}")
    if not ordered:
        raise HeadsError(f"{source.file} holds no tensors of Medusa heads")
    return ordered


def _same_numbers(layout: Layout, name: str, expected: str) -> bool:
    """Whether two names differ in leading zeros at most."""
    return layout.numbers(name) == layout.numbers(expected)
