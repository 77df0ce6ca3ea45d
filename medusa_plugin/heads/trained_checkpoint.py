"""Heads in our own format, found on disk: `heads.safetensors` and the config that describes it."""

from __future__ import annotations

import torch
from pydantic import ValidationError

from medusa_plugin.heads.base import HeadsError, TargetSpec
from medusa_plugin.heads.draft_vocab import count_ranked
from medusa_plugin.heads.files import CONFIG_FILE, DRAFT_VOCAB_FILE
from medusa_plugin.heads.source import Source
from medusa_plugin.heads.trained import TrainedConfig
from medusa_plugin.heads.trained_files import TrainedHeads, build_trained
from medusa_plugin.heads.variant import Variant, counted, require_shape

_TABLE = "output.table"
_META = torch.device("meta")


class TrainedVariant(Variant):
    """Heads that `medusa train` made.

    Args:
        source: with the heads' tensors and their config.

    Raises:
        HeadsError: the config is malformed, or a tensor is unknown, missing or of a wrong shape or
            dtype; names it.
    """

    format = "medusa train"
    reads_tokens = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self.config = config = _read_config(source)
        self.kind = config.kind
        self.num_heads = config.num_heads
        self.num_layers = 1
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        try:
            outline = _outline(config).state_dict()
        except (RuntimeError, OverflowError, TypeError) as error:  # sizes beyond any tensor
            reason = str(error).splitlines()[0]
            raise HeadsError(
                f"{source.directory / CONFIG_FILE} describes no such heads: {reason}"
            ) from error
        expected = {name: tuple(tensor.shape) for name, tensor in outline.items()}
        self.names = tuple(expected)
        self.has_bias = any("bias" in name for name in expected)
        for name, header in source.headers.items():
            if name not in expected:
                raise HeadsError(
                    f"{header.file}: unknown tensor {name[:100]!r}: {config.kind} heads hold "
                    f"{', '.join(expected)}"
                )
        for name, shape in expected.items():
            if name not in source.headers:
                raise HeadsError(
                    f"{source.file}: tensor {name} is missing from {config.kind} heads"
                )
            require_shape(source, name, shape)
        source.require_floats(self.names)
        if config.output_rank:
            self.table_rows = config.draft_vocab_size
            ranked = count_ranked(source.directory)
            if ranked < config.draft_vocab_size:
                raise HeadsError(
                    f"{source.directory / DRAFT_VOCAB_FILE} ranks {ranked} token ids, but the "
                    f"heads' output table is for {config.draft_vocab_size}"
                )

    def describe(self) -> str:
        """See `Variant.describe`."""
        config = self.config
        output = "shared lm head"
        if config.output_rank:
            output = f"own table of {config.draft_vocab_size} tokens, rank {config.output_rank}"
        return f"{counted(config.num_heads, f'{config.kind} head')}, width {config.width}, {output}"

    def build(self, target: TargetSpec, draft_vocab: torch.Tensor | None) -> TrainedHeads:
        """See `Variant.build`."""
        tensors = {}
        for name, tensor in self.source.read_for(self.names, target):
            rows = tensor
            if name == _TABLE and draft_vocab is not None:
                rows = tensor[: len(draft_vocab)].clone()
            tensors[name] = rows.to(target.device)
        with _META:  # every parameter is replaced below
            heads = build_trained(self.config, target, draft_vocab)
        heads.load_state_dict(tensors, assign=True)
        heads.pack()
        return heads.requires_grad_(False).eval()


def _read_config(source: Source) -> TrainedConfig:
    file = source.directory / CONFIG_FILE
    if not source.config:
        raise HeadsError(f"{file} is missing or empty: heads in our own format need it")
    try:
        return TrainedConfig.model_validate(source.config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise HeadsError(f"{file}: {place}: {first['msg']}") from None


def _outline(config: TrainedConfig) -> TrainedHeads:
    """The heads without values."""
    embedding = torch.empty(config.vocab_size, config.hidden_size, device=_META)
    target = TargetSpec(
        config.hidden_size, config.vocab_size, embedding, torch.float32, _META, embedding
    )
    with _META:
        return build_trained(config, target, None)
