"""From vLLM's engine arguments to MedusaConfig and back into vLLM's own terms.

| vLLM field | our meaning |
|---|---|
| `speculative_config["method"] == "medusa"` | trees, in place of vLLM 0.32's chain |
| `speculative_config["model"]` | `MedusaConfig.heads` |
| `speculative_config["num_speculative_tokens"]` | nodes of the tree without its root |
| `additional_config["medusa"]` | the other fields of `MedusaConfig` |
| `worker_cls` | our worker, which brings our model runner |
| `scheduler_cls` | our scheduler: grammar masks for trees, an end for requests that fail |
| result: `method="custom_class"`, `model=PROPOSER` | the public hook of both 0.32 and 0.33 |
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from medusa_plugin import __version__
from medusa_plugin.config import (
    MedusaConfig,
    MedusaConfigError,
)
from medusa_plugin.embedded import embedded_heads_path, is_embedded_model
from medusa_plugin.heads import MEDUSA_FILES, HeadsInfo, holds_heads, locate_heads, peek_heads
from medusa_plugin.tree.static import choose_tree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.vllm_glue.cli import METHOD
from medusa_plugin.vllm_glue.support import custom_processors, require_supported_engine

logger = logging.getLogger("vllm.medusa")

PROPOSER = "medusa_plugin.vllm_glue.proposer.MedusaProposer"
SCHEDULER = "medusa_plugin.vllm_glue.scheduler.MedusaScheduler"
CPU_WORKER = "medusa_plugin.vllm_glue.worker.MedusaCPUWorker"
CUDA_WORKER = "medusa_plugin.vllm_glue.worker_cuda.MedusaCUDAWorker"
OPTIONS_KEY = "medusa"
DEFAULT_NUM_NODES = 15
"""A ceiling, where sizes follow the measured cost. Root and nodes fill one tile of AMX units and
of a GPU's tensor cores."""


def is_medusa(speculative_config: Any) -> bool:
    """Whether a vLLM `SpeculativeConfig` (or None) is ours."""
    return speculative_config is not None and speculative_config.model == PROPOSER


def without_speculation(vllm_config: Any) -> Any:
    """A shallow copy of `vllm_config` that says nothing of speculation."""
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return plain


def translate_engine_args(engine_args: Any) -> None:
    """Rewrite `EngineArgs` that ask for Medusa, in place; leave all others alone.

    Raises:
        MedusaConfigError: an option is unknown, malformed or contradicts another.
        HeadsError: the heads cannot be read.
    """
    speculative = _speculative_fields(engine_args)
    additional = dict(engine_args.additional_config or {})
    if speculative.get("method") != METHOD:
        _require_nothing_asked(speculative, additional)
        return
    config = _read_options(engine_args.model, speculative, additional.get(OPTIONS_KEY))
    plan = plan_trees(config, peek_heads(config.heads, use_tuning=config.tuning))

    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": plan.num_nodes,
    }
    additional[OPTIONS_KEY] = config.model_dump()
    engine_args.additional_config = additional
    worker = CUDA_WORKER if current_platform.is_cuda() else CPU_WORKER
    _bring_own(engine_args, "worker", worker)
    _bring_own(engine_args, "scheduler", SCHEDULER)


def finish_engine_config(vllm_config: Any) -> None:
    """Refuse, before weights are loaded, what cannot work with trees yet; log what is on.

    Raises:
        UnsupportedFeatureError: names every feature in the way.
        HeadsError: the heads do not fit the target.
    """
    speculative = vllm_config.speculative_config
    if not is_medusa(speculative):
        if speculative is not None and speculative.method == METHOD:
            # vLLM 0.32 recognises some checkpoints by itself and would run its own chain.
            raise MedusaConfigError(
                f"the draft {speculative.model!r} holds Medusa heads, but the method was not "
                "named: add 'method': 'medusa' to speculative_config"
            )
        return
    config = medusa_config(vllm_config)
    heads = peek_heads(config.heads, use_tuning=config.tuning)
    model_config = vllm_config.model_config
    require_supported_engine(vllm_config)
    if current_platform.is_cuda():
        # On some GPUs vLLM would choose a backend that we do not extend.
        vllm_config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
    heads.require_target(
        hidden_size=model_config.get_hidden_size(), vocab_size=model_config.get_vocab_size()
    )
    plan = plan_trees(config, heads)
    _require_draft_vocabulary(config, heads, plan)
    _require_processors(config, model_config)
    logger.info(
        "medusa %s: heads %s (%s), %s, sizes %s, look-up %s, draft vocabulary %s, acceptance %s; "
        "not supported with it: see README, section Support.",
        __version__,
        config.heads,
        heads.describe(),
        plan.describe(),
        config.sizes,
        "on" if config.lookup else "off",
        config.draft_vocab_size,
        "typical (LOSSY)" if config.acceptance == "typical" else "lossless (greedy and sampled)",
    )
    if config.acceptance == "typical":
        logger.warning(
            "medusa: typical acceptance is on by default and is LOSSY: above temperature 0 the "
            "text no longer follows the model's own distribution (epsilon %s, alpha %s). A request "
            "keeps it with extra_args={'medusa': {'acceptance': 'lossless'}}.",
            config.typical_epsilon,
            config.typical_alpha,
        )


def medusa_config(vllm_config: Any) -> MedusaConfig:
    """The validated options that `translate_engine_args` stored in `additional_config`."""
    return MedusaConfig.from_options(vllm_config.additional_config[OPTIONS_KEY])


@dataclass(frozen=True)
class TreePlan:
    """The trees that a configuration asks for."""

    num_nodes: int
    """Most nodes of a tree."""
    topology: TokenTree | None
    """Static topology; None for dynamic trees."""

    def describe(self) -> str:
        """For the start-up line."""
        if self.topology is None:
            return f"dynamic trees of up to {self.num_nodes} nodes"
        return f"a static tree of {self.num_nodes} nodes, depth {max(self.topology.depths)}"


def plan_trees(config: MedusaConfig, heads: HeadsInfo) -> TreePlan:
    """The trees that `config` asks for on `heads`.

    Raises:
        TreeError: the tree is malformed or needs more heads than there are.
        MedusaConfigError: `num_speculative_tokens` contradicts the size of `tree`.
    """
    wanted = config.num_speculative_tokens
    num_nodes = wanted or DEFAULT_NUM_NODES
    if config.tree == "dynamic":
        return TreePlan(num_nodes, None)
    tree = choose_tree(
        config.tree, num_heads=heads.num_heads, num_nodes=num_nodes, accuracies=heads.accuracies
    )
    if wanted is not None and tree.num_nodes != wanted:
        raise MedusaConfigError(
            f"num_speculative_tokens is {wanted}, but the tree has {tree.num_nodes} nodes: leave "
            "num_speculative_tokens out, or give a tree of that size"
        )
    return TreePlan(tree.num_nodes, tree)


def _bring_own(engine_args: Any, part: str, ours: str) -> None:
    """Set the class of a part of the engine, in place, unless the user brings another."""
    given = getattr(engine_args, f"{part}_cls")
    if given not in (None, "auto", ours):
        raise MedusaConfigError(
            f"--{part}-cls {given} and speculative method 'medusa' exclude each other: medusa "
            f"brings its own {part}"
        )
    setattr(engine_args, f"{part}_cls", ours)


def _require_nothing_asked(speculative: dict[str, Any], additional: dict[str, Any]) -> None:
    """Refuse options of ours that would have no effect."""
    ours = speculative.get("model") == PROPOSER
    if OPTIONS_KEY in additional and not ours:
        raise MedusaConfigError(
            f"additional_config[{OPTIONS_KEY!r}] is given, but speculation with Medusa is not on: "
            "add speculative_config={'method': 'medusa', ...}, or leave it out"
        )
    if ours and OPTIONS_KEY not in additional:
        raise MedusaConfigError(
            "speculative_config names MedusaProposer itself: use {'method': 'medusa', 'model': "
            "HEADS_DIR} instead of method 'custom_class'"
        )


def _require_draft_vocabulary(config: MedusaConfig, heads: HeadsInfo, plan: TreePlan) -> None:
    """Check `draft_vocab_size` against the ranking that comes with the heads, and the tree."""
    size = config.draft_vocab_size
    if not isinstance(size, int):
        return
    if size > heads.draft_vocab_ranked:
        raise MedusaConfigError(
            f"draft_vocab_size is {size}, but the heads in {config.heads} rank "
            f"{heads.draft_vocab_ranked} tokens by frequency (draft_vocab.safetensors): choose at "
            "most that, or 'full'"
        )
    rank = 0 if plan.topology is None else max(plan.topology.ranks)
    if rank >= size:
        raise MedusaConfigError(
            f"the tree uses candidates up to rank {rank}, but draft_vocab_size {size} offers only "
            f"{size}: raise draft_vocab_size"
        )


def _require_processors(config: MedusaConfig, model_config: Any) -> None:
    """Check `acceptance` against the engine's logits processors."""
    if config.acceptance == "typical" and (custom := custom_processors(model_config)):
        raise MedusaConfigError(
            "acceptance 'typical' judges tokens by softmax(logits / temperature), which "
            f"{', '.join(custom)} may change: leave one of them out"
        )


def _speculative_fields(engine_args: Any) -> dict[str, Any]:
    """Speculative options of `EngineArgs` from the dict and its --spec-* aliases.

    Raises:
        MedusaConfigError: an alias contradicts the dict of a Medusa engine.
    """
    fields = {
        key.replace("-", "_"): value
        for key, value in (engine_args.speculative_config or {}).items()
    }
    aliases = {
        "method": engine_args.spec_method,
        "model": engine_args.spec_model,
        "num_speculative_tokens": engine_args.spec_tokens,
    }
    given = {name: alias for name, alias in aliases.items() if alias is not None}
    merged = {**given, **fields}
    if merged.get("method") == METHOD:
        for name in given.keys() & fields.keys():
            _require_same(name, fields[name], "speculative_config", given[name], "--spec-*")
    return merged


def _read_options(model: str, speculative: dict[str, Any], options: Any) -> MedusaConfig:
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise MedusaConfigError(
            f"additional_config[{OPTIONS_KEY!r}] must be a dict of options, got {options!r}"
        )
    given = {key: value for key, value in speculative.items() if key != "method"}
    if "model" in given:
        heads = given.pop("model")
        _require_same("heads", given.get("heads", heads), "speculative_config", heads, "model")
        given["heads"] = heads
    for name in given.keys() & options.keys():
        place = f"additional_config[{OPTIONS_KEY!r}]"
        _require_same(name, given[name], "speculative_config", options[name], place)
    merged = {**options, **given}
    if merged.get("heads") is None:
        merged["heads"] = find_heads(model)
    if isinstance(merged["heads"], str | Path):
        # A hub id becomes a directory here, once, before other processes read it.
        merged["heads"] = str(locate_heads(Path(merged["heads"]).expanduser()))
    return MedusaConfig.from_options(merged)


def _require_same(name: str, first: Any, place: str, second: Any, other_place: str) -> None:
    if first != second:
        raise MedusaConfigError(
            f"option {name!r} is {first!r} in {place}, but {second!r} in {other_place}: give it "
            "once"
        )


def find_heads(model: str) -> Path:
    """Heads that belong to `model` beyond doubt: those beside it, or the embedded model's own.

    Raises:
        MedusaConfigError: there are none.
    """
    directory = Path(model)
    for candidate in (directory, directory / "medusa"):
        if holds_heads(candidate):
            return candidate
    if is_embedded_model(directory):
        return embedded_heads_path()
    raise MedusaConfigError(
        f"no Medusa heads were named and none lie beside the model {model!r} (looked for "
        f"{' or '.join(MEDUSA_FILES)} and others there and in its folder medusa/): give them with "
        "--medusa-heads DIR or speculative_config={'method': 'medusa', 'model': DIR}"
    )
