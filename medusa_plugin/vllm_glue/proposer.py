"""The class that vLLM instantiates for `method="custom_class"`: loads the heads with the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from medusa_plugin.draft import TreeDrafter
from medusa_plugin.heads import DraftHeads, HeadsInfo, TargetSpec, load_heads, peek_heads
from medusa_plugin.tree.estimate import HeadCalibration
from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from medusa_plugin.vllm_glue.tensor_parallel import gather_vocabulary
from medusa_plugin.vllm_glue.translate import medusa_config, plan_trees

logger = logging.getLogger("vllm.medusa")


class MedusaProposer:
    """Owns the drafter of a worker; the model runner calls the drafter itself."""

    drafter: TreeDrafter
    """Set by `load_model` on the rank that decides."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._config = medusa_config(vllm_config)

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads onto the target's device, sharing its language-model head.

        With tensor parallelism they are the first rank's alone: it drafts for all. The others
        give their rows of a language-model head that is split between the ranks.

        Raises:
            HeadsError: the heads cannot be read or do not fit.
        """
        started = time.perf_counter()
        model_config = self._vllm_config.model_config
        info = peek_heads(self._config.heads, use_tuning=self._config.tuning)
        output = _output_embedding(target_model)
        lm_head = gather_vocabulary(output)
        embedding = None
        if info.variant.reads_tokens:  # on every rank, since all give their rows
            layer = _input_embedding(target_model)
            tied = layer.weight is output.weight
            embedding = lm_head if tied else gather_vocabulary(layer)
        if lm_head is None:
            return
        target = TargetSpec(
            hidden_size=model_config.get_hidden_size(),
            vocab_size=model_config.get_vocab_size(),
            lm_head=lm_head,
            dtype=model_config.dtype,
            device=lm_head.device,
            embedding=embedding,
        )
        heads = load_heads(
            self._config.heads, target, draft_vocab_size=self._config.draft_vocab_size
        )
        plan = plan_trees(self._config, info)
        self.drafter = TreeDrafter(
            heads,
            num_nodes=plan.num_nodes,
            tree=plan.topology,
            calibration=_calibration(info, heads),
            lookup=self._config.lookup,
            max_rows=self._vllm_config.scheduler_config.max_num_batched_tokens,
        )
        logger.info("medusa heads loaded in %.2f s", time.perf_counter() - started)

    @property
    def sizes_follow_cost(self) -> bool:
        """Whether the drafter is to be told what a step costs."""
        return self._config.sizes == "auto"

    def propose(self, *args: Any, **kwargs: Any) -> NoReturn:
        """vLLM's stock call, which passes no hidden states; our model runner never makes it."""
        raise RuntimeError(
            "MedusaProposer.propose was called by vLLM's own model runner: the worker class of "
            "medusa is not in use. Start the engine with method 'medusa', not 'custom_class'"
        )


def _calibration(info: HeadsInfo, heads: DraftHeads) -> Sequence[HeadCalibration]:
    """What the heads' tuning says; empty without one."""
    tuning = info.tuning
    if tuning is None:
        return ()
    if tuning.draft_vocab_size != heads.max_top_k:
        logger.warning(
            "medusa: the heads were tuned with a draft vocabulary of %d tokens, but have %d here: "
            "their estimates start less exact. Run 'medusa tune' with that draft vocabulary",
            tuning.draft_vocab_size,
            heads.max_top_k,
        )
    return [HeadCalibration(scaling.bias, scaling.scale) for scaling in tuning.calibration]


def _output_embedding(target_model: Any) -> Any:
    """The target's language-model head; tied models have the embedding's.

    Raises:
        UnsupportedFeatureError: there is none in plain floating point.
    """
    layer = getattr(target_model, "lm_head", None)
    if layer is None:
        layer = getattr(getattr(target_model, "model", None), "embed_tokens", None)
    return _plain_layer(layer, "language-model head", target_model)


def _input_embedding(target_model: Any) -> Any:
    """The target's embedding of tokens.

    Raises:
        UnsupportedFeatureError: there is none in plain floating point.
    """
    layer = None
    for path in (("model", "embed_tokens"), ("transformer", "wte")):
        found = target_model
        for name in path:
            found = getattr(found, name, None)
        layer = layer if found is None else found
    return _plain_layer(layer, "input embedding", target_model)


def _plain_layer(layer: Any, what: str, target_model: Any) -> Any:
    layer = getattr(layer, "base_layer", layer)  # inside a wrapper for LoRA
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise UnsupportedFeatureError(
            f"medusa does not support yet: the {what} of {type(target_model).__name__} "
            f"({type(layer).__name__}), which has no plain weight to share with the heads. Run "
            "this model without speculation."
        )
    return layer
