"""IBM's MLP speculators on disk: the `mlp_speculator` architecture, tied or not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from medusa_plugin.heads.base import HeadsError, TargetSpec
from medusa_plugin.heads.files import CONFIG_FILE
from medusa_plugin.heads.mlp_speculator import MLPSpeculatorHeads, MLPStage
from medusa_plugin.heads.source import Source
from medusa_plugin.heads.variant import Variant, counted, require_shape

_NAME = re.compile(
    r"(?:speculator\.)?(?P<group>emb|proj|head|ln)\.(?P<stage>[0-9]{1,4})"
    r"\.(?P<part>weight|bias)"
)
_GROUPS = ("emb.weight", "proj.weight", "head.weight", "ln.weight", "ln.bias")
_MAX_HEADS = 64


class MLPSpeculatorVariant(Variant):
    """Heads with an embedding of their own.

    Args:
        source: with the heads' tensors and their config.

    Raises:
        HeadsError: the config is missing, or a tensor is unknown, missing or of a wrong shape or
            dtype; names it.
    """

    kind = "mlp_speculator"
    format = "MLP speculator"
    num_layers = 1
    has_bias = False

    def __init__(self, source: Source) -> None:
        self.source = source
        groups = _group(source)
        self.num_heads = _count_heads(source, groups)
        self._stages = tuple(_stage(source, groups, i) for i in range(self.num_heads))
        self.names = tuple(dict.fromkeys(n for stage in self._stages for n in stage.values()))
        source.require_floats(self.names)
        first = self._stages[0]
        projection = source.headers[first["proj.weight"]].shape
        table = source.headers[first["emb.weight"]].shape
        # Scalars and vectors have no such sizes; the shapes are checked below.
        inner, self.hidden_size = projection if len(projection) == 2 else (0, 0)
        vocab_size = self.vocab_size = table[0] if table else 0
        for i, stage in enumerate(self._stages):
            require_shape(source, stage["emb.weight"], (vocab_size, inner))
            width = self.hidden_size if i == 0 else inner
            require_shape(source, stage["proj.weight"], (inner, width))
            require_shape(source, stage["head.weight"], (vocab_size, inner))
            for part in ("ln.weight", "ln.bias"):
                require_shape(source, stage[part], (inner,))
        self._inner = inner
        self._scale_input = _scale_input(source)
        self.warnings = tuple(self._compare_config())

    @property
    def scales_input(self) -> bool:
        """Whether the hidden state is normalised first."""
        return self._scale_input

    def describe(self) -> str:
        """See `Variant.describe`."""
        outputs = {stage["head.weight"] for stage in self._stages}
        tied = "tied" if len(outputs) < self.num_heads else "untied"
        return f"{counted(self.num_heads, 'MLP speculator head')}, width {self._inner}, {tied}"

    def build(self, target: TargetSpec, draft_vocab: torch.Tensor | None) -> MLPSpeculatorHeads:
        """See `Variant.build`."""
        read = {
            name: tensor.to(target.device)
            for name, tensor in self.source.read_for(self.names, target)
        }
        if draft_vocab is not None:
            for name in {stage["head.weight"] for stage in self._stages}:
                read[name] = read[name].index_select(0, draft_vocab)
        stages = [
            MLPStage(
                embedding=read[stage["emb.weight"]],
                projection=read[stage["proj.weight"]],
                norm_weight=read[stage["ln.weight"]],
                norm_bias=read[stage["ln.bias"]],
                output=read[stage["head.weight"]],
            )
            for stage in self._stages
        ]
        return MLPSpeculatorHeads(
            stages,
            hidden_size=self.hidden_size,
            scale_input=self._scale_input,
            draft_vocab=draft_vocab,
        )

    def _compare_config(self) -> Iterator[str]:
        found = {
            "n_predict": self.num_heads,
            "emb_dim": self.hidden_size,
            "vocab_size": self.vocab_size,
        }
        if self.source.config.get("inner_dim"):  # 0 stands for emb_dim
            found["inner_dim"] = self._inner
        yield from self.source.compare_config(**found)


def recognises_mlp_speculator(source: Source) -> bool:
    """Whether some tensor has a name of this kind."""
    return any(map(_NAME.fullmatch, source.headers))


def _group(source: Source) -> dict[str, dict[int, str]]:
    """Name by stage of each group of tensors."""
    groups: dict[str, dict[int, str]] = {group: {} for group in _GROUPS}
    for name, header in source.headers.items():
        match = _NAME.fullmatch(name)
        group = "" if match is None else f"{match['group']}.{match['part']}"
        if match is None or group not in groups:
            raise HeadsError(
                f"{header.file}: unknown tensor {name[:100]!r}: an MLP speculator holds "
                "emb.N.weight, proj.N.weight, head.N.weight, ln.N.weight and ln.N.bias only"
            )
        stage = int(match["stage"])
        if stage in groups[group]:
            raise HeadsError(
                f"{header.file}: tensor {groups[group][stage]} is there twice, the second time as "
                f"{name!r}"
            )
        groups[group][stage] = name
    return groups


def _count_heads(source: Source, groups: Mapping[str, Mapping[int, str]]) -> int:
    """How many heads: files of tied ones may hold each tensor once, then the config tells."""
    tied = all(_is_tied(group, stages) for group, stages in groups.items())
    count = 1 + max((max(stages) for stages in groups.values() if stages), default=0)
    given = source.config.get("n_predict", count)
    if tied and source.config.get("tie_weights", False):
        if type(given) is not int or not 1 <= given <= _MAX_HEADS:
            raise HeadsError(
                f"{source.directory / CONFIG_FILE}: n_predict is {given!r}, expected 1 to "
                f"{_MAX_HEADS}"
            )
        count = max(count, given)
    if count > _MAX_HEADS:
        raise HeadsError(f"{source.file}: {count} heads are too many, expected 1 to {_MAX_HEADS}")
    return count


def _is_tied(group: str, stages: Mapping[int, str]) -> bool:
    """Whether only the first of the tensors that tied heads share is there."""
    return set(stages) <= {0, 1} if group == "proj.weight" else set(stages) == {0}


def _stage(source: Source, groups: Mapping[str, Mapping[int, str]], stage: int) -> dict[str, str]:
    """Name of each group's tensor for one head."""
    names = {}
    for group, stages in groups.items():
        shared = min(stage, 1) if group == "proj.weight" else 0
        place = stage
        if stage not in stages and source.config.get("tie_weights") and _is_tied(group, stages):
            place = shared
        if place not in stages:
            part, _, kind = group.partition(".")
            raise HeadsError(
                f"{source.file}: tensor {part}.{stage}.{kind} is missing from the MLP speculator"
            )
        names[group] = stages[place]
    return names


def _scale_input(source: Source) -> bool:
    file = source.directory / CONFIG_FILE
    if not source.config:
        raise HeadsError(
            f"{file} is missing or empty: an MLP speculator needs it, since its weights do not "
            "tell whether the hidden state is to be normalised (scale_input)"
        )
    value = source.config.get("scale_input", False)
    if not isinstance(value, bool):
        raise HeadsError(f"{file}: scale_input is {value!r}, expected true or false")
    return value
