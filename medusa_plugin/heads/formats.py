"""Layouts of plain Medusa heads: what each project calls the same tensors.

One table serves reading and writing. `{head}`, `{layer}` and `{part}` stand for the head, the
residual block and "weight" or "bias"; the language-model head of the layouts that number it takes
the number after the last block.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from medusa_plugin.heads.base import HeadsError
from medusa_plugin.heads.files import Header

LM_HEAD = -1
"""In place of a residual block's number."""

_FIELDS = {
    "{head}": "(?P<head>[0-9]{1,9})",
    "{layer}": "(?P<layer>[0-9]{1,9})",
    "{part}": "(?P<part>weight|bias)",
}


@dataclass(frozen=True)
class TensorKey:
    """A tensor of plain Medusa heads, whatever its name."""

    head: int
    layer: int
    """From 0; `LM_HEAD` for the head's own language-model head."""
    part: str
    """ "weight" or "bias"."""


@dataclass(frozen=True)
class Layout:
    """Names of one project."""

    format: str
    linear: str
    lm_head: str
    extras: frozenset[str] = frozenset()
    """Names of tensors that belong to no head."""

    def name(self, key: TensorKey, num_layers: int) -> str:
        """The name of `key` in heads of `num_layers` residual blocks."""
        if key.layer == LM_HEAD:
            return self.lm_head.format(head=key.head, layer=num_layers)
        return self.linear.format(head=key.head, layer=key.layer, part=key.part)

    def parse(self, name: str) -> TensorKey | None:
        """The key of a name of this layout."""
        if match := self._linear.fullmatch(name):
            return TensorKey(int(match["head"]), int(match["layer"]), match["part"])
        if match := self._lm_head.fullmatch(name):
            return TensorKey(int(match["head"]), LM_HEAD, "weight")
        return None

    def numbers(self, name: str) -> tuple[int, ...]:
        """The numbers in a name of this layout, as far as it has them."""
        match = self._linear.fullmatch(name) or self._lm_head.fullmatch(name)
        found = {} if match is None else match.groupdict()
        return tuple(int(found[field]) for field in ("head", "layer") if field in found)

    def is_one(self, name: str) -> bool:
        """Whether `name` is of this layout."""
        return name in self.extras or self.parse(name) is not None

    @cached_property
    def _linear(self) -> re.Pattern[str]:
        return _compile(self.linear)

    @cached_property
    def _lm_head(self) -> re.Pattern[str]:
        return _compile(self.lm_head)


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    for field, group in _FIELDS.items():
        pattern = pattern.replace(field, group)
    return re.compile(pattern)


def _numbered(format_name: str, prefix: str) -> Layout:
    return Layout(
        format_name, prefix + "{head}.{layer}.linear.{part}", prefix + "{head}.{layer}.weight"
    )


def _vllm(prefix: str) -> Layout:
    return Layout(
        "vLLM",
        prefix + "blocks.{head}.layers.{layer}.{part}",
        prefix + "lm_heads.{head}.weight",
        frozenset({prefix + "token_map", prefix + "lm_head.weight"}),
    )


FASTER_DECODING = _numbered("FasterDecoding", "")
MERGED = _numbered("merged (axolotl, RTP-LLM, MLC)", "medusa_head.")
VLLM = _vllm("")
TENSORRT_LLM = Layout(
    "TensorRT-LLM",
    "medusa_heads.{head}.medusa_layers.{layer}.linear.{part}",
    "medusa_heads.{head}.lm_head.weight",
)
LAYOUTS = (
    FASTER_DECODING,
    MERGED,
    VLLM,
    _vllm("medusa_heads."),
    TENSORRT_LLM,
    _numbered("ModelOpt", "medusa_heads."),
    _numbered("community (heads.*)", "heads."),
)

_SCALES = (".weight_scale", ".input_scale")
"""Of 8-bit floats, beside the weight; the second one is for activations and not needed."""


def detect_layout(headers: Mapping[str, Header]) -> Layout:
    """The layout that most of the names are of; refuses names of no or another layout.

    Raises:
        HeadsError: names the first unknown tensor.
    """
    plain = [name for name in headers if not is_scale(name, headers)]
    layout = max(LAYOUTS, key=lambda layout: sum(map(layout.is_one, plain)))
    for name in plain:
        if not layout.is_one(name):
            raise HeadsError(
                f"{headers[name].file}: unknown tensor {name[:100]!r}: plain Medusa heads hold "
                f"{layout.linear} and {layout.lm_head} only; other kinds (EAGLE, whole models "
                "without heads) are not supported"
            )
    return layout


def is_scale(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is a scale of an 8-bit weight in `names`."""
    return any(
        name.endswith(scale) and name.removesuffix(scale) + ".weight" in names for scale in _SCALES
    )
