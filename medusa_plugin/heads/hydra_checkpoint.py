"""Hydra heads on disk: the MLP heads of zankner/Hydra; its attention layers are refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from medusa_plugin.heads.base import HeadsError, TargetSpec
from medusa_plugin.heads.files import CONFIG_FILE
from medusa_plugin.heads.hydra import HydraHead, HydraHeads, Linear
from medusa_plugin.heads.source import HYDRA_FILES, Source
from medusa_plugin.heads.variant import Variant, counted, require_shape

_NAME = re.compile(
    r"(?:hydra_head\.)?(?P<local>"
    r"hydra_mlp\.(?P<head>[0-9]{1,4})\.(?P<layer>[0-9]{1,4})\.(?:linear|res_connection)"
    r"\.(?:weight|bias)"
    r"|hydra_lm_head\.[0-9]{1,4}\.(?:weight|bias))"
)
_FOREIGN = {
    "prefix_embeding_layer": "an attention layer over the whole prefix (prefix-mlp, Hydra++)",
    "prefix_embedding_layer": "an attention layer over the whole prefix (prefix-mlp, Hydra++)",
    "self_attn": "attention between the drafted tokens (eagle-attn)",
    "cross_attn": "cross-attention (cross-attn)",
}
_EMBEDDING = "input_embed_fn.weight"
"""A frozen copy of the target's input embedding, which its authors' modules carry along."""
_MAX_HEADS = 64
_PARTS = ("weight", "bias")


class HydraVariant(Variant):
    """MLP heads that read the tokens of the branch ("grounded" ones).

    Args:
        source: with the heads' tensors.

    Raises:
        HeadsError: the heads are of a sort that reads more than that, or a tensor is unknown,
            missing or of a wrong shape or dtype; names it.
    """

    kind = "hydra"
    format = "Hydra"
    has_bias = True
    reads_tokens = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self._by_name = _local_names(source)
        _require_known_sort(source)
        numbers = [
            (int(match["head"]), int(match["layer"]))
            for match in map(_NAME.fullmatch, source.headers)
            if match and match["head"]
        ]
        self.num_heads = 1 + max((head for head, _ in numbers), default=-1)
        self.num_layers = 1 + max((layer for _, layer in numbers), default=-1)
        if not 1 <= self.num_heads <= _MAX_HEADS or self.num_layers > _MAX_HEADS:
            raise HeadsError(
                f"{source.file}: {self.num_heads} Hydra heads of {self.num_layers} layers, "
                f"expected 1 to {_MAX_HEADS} of each"
            )
        expected = list(self._expected())
        for local in expected:
            if local not in self._by_name:
                raise HeadsError(self._missing(local))
        unexpected = next((name for name in self._by_name if name not in set(expected)), None)
        if unexpected is not None:
            raise HeadsError(
                f"{source.file}: tensor {unexpected} does not belong to {self._structure()}"
            )
        self.names = tuple(self._by_name.values())
        source.require_floats(self.names)
        table = source.headers[self._by_name["hydra_lm_head.0.weight"]].shape
        # Other shapes have no such sizes; they are checked below.
        vocab_size, self.hidden_size = table if len(table) == 2 else (0, 0)
        self.vocab_size = vocab_size
        for local in expected:
            require_shape(source, self._by_name[local], self._shape(local, vocab_size))
        self.warnings = tuple(
            source.compare_config(hydra_num_heads=self.num_heads, hydra_num_layers=self.num_layers)
        )

    def describe(self) -> str:
        """See `Variant.describe`."""
        return f"{counted(self.num_heads, 'Hydra head')}, {counted(self.num_layers, 'layer')}"

    def build(self, target: TargetSpec, draft_vocab: torch.Tensor | None) -> HydraHeads:
        """See `Variant.build`.

        Raises:
            HeadsError: the target gives no input embedding.
        """
        if target.embedding is None:
            raise HeadsError(
                "hydra heads read the target's input embedding, which this target does not give: "
                "use plain Medusa heads"
            )
        read = {
            name: tensor.to(target.device)
            for name, tensor in self.source.read_for(self.names, target)
        }

        def linear(prefix: str) -> Linear:
            weight, bias = (read[self._by_name[f"{prefix}.{part}"]] for part in _PARTS)
            return weight, bias

        heads = []
        for head in range(self.num_heads):
            output = linear(f"hydra_lm_head.{head}")
            if draft_vocab is not None:
                output = output[0].index_select(0, draft_vocab), output[1][draft_vocab]
            heads.append(
                HydraHead(
                    first=linear(f"hydra_mlp.{head}.0.linear"),
                    shortcut=linear(f"hydra_mlp.{head}.0.res_connection"),
                    blocks=tuple(
                        linear(f"hydra_mlp.{head}.{layer}.linear")
                        for layer in range(1, self.num_layers)
                    ),
                    output=output,
                )
            )
        return HydraHeads(heads, target.embedding[: target.vocab_size], draft_vocab)

    def _structure(self) -> str:
        return f"{self.num_heads} Hydra heads of {self.num_layers} layers"

    def _expected(self) -> Iterator[str]:
        for head in range(self.num_heads):
            linears = [f"hydra_mlp.{head}.0.res_connection", f"hydra_lm_head.{head}"]
            linears += [f"hydra_mlp.{head}.{layer}.linear" for layer in range(self.num_layers)]
            for linear in linears:
                yield from (f"{linear}.{part}" for part in _PARTS)

    def _missing(self, local: str) -> str:
        message = f"{self.source.file}: tensor {local} is missing from {self._structure()}"
        if "res_connection" in local:
            message += (
                ": only heads that read the drafted tokens (grounded_heads) are supported, which "
                "have it"
            )
        return message

    def _shape(self, local: str, vocab_size: int) -> tuple[int, ...]:
        kind, head, *rest = local.split(".")
        rows = vocab_size if kind == "hydra_lm_head" else self.hidden_size
        if local.endswith("bias"):
            return (rows,)
        inputs = int(head) + 2 if kind == "hydra_mlp" and rest[0] == "0" else 1
        return (rows, inputs * self.hidden_size)


def recognises_hydra(source: Source) -> bool:
    """Whether the file or some tensor has a name of this kind."""
    return source.file.name in HYDRA_FILES or any(map(_NAME.fullmatch, source.headers))


def _local_names(source: Source) -> Mapping[str, str]:
    """Names in the files by names without prefix."""
    names: dict[str, str] = {}
    for name, header in source.headers.items():
        match = _NAME.fullmatch(name)
        if name.removeprefix("hydra_head.") == _EMBEDDING:
            continue
        if match is None:
            for part, reason in _FOREIGN.items():
                if part in name:
                    raise HeadsError(
                        f"{header.file}: {name[:100]!r} belongs to {reason}, which is not "
                        "supported: use Hydra heads of the architecture 'mlp'"
                    )
            raise HeadsError(
                f"{header.file}: unknown tensor {name[:100]!r}: Hydra heads hold "
                "hydra_mlp.HEAD.LAYER.linear.*, hydra_mlp.HEAD.0.res_connection.* and "
                "hydra_lm_head.HEAD.* only"
            )
        if match["local"] in names:
            raise HeadsError(
                f"{header.file}: tensor {names[match['local']]} is there twice, the second time "
                f"as {name!r}"
            )
        names[match["local"]] = name
    return names


def _require_known_sort(source: Source) -> None:
    """Refuse heads that read something else, which the tensors do not tell."""
    config, file = source.config, source.directory / CONFIG_FILE
    if config.get("hydra_head_arch", "mlp") != "mlp":
        raise HeadsError(
            f"{file}: hydra_head_arch is {config['hydra_head_arch']!r}, only 'mlp' is supported"
        )
    if config.get("hidden_state_offset", 0) != 0:
        raise HeadsError(
            f"{file}: hidden_state_offset is {config['hidden_state_offset']!r}: the heads read "
            "another layer of the target than its last, which is not supported"
        )
