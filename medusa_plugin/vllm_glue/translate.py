"""From vLLM's engine arguments to MedusaConfig and back into vLLM's own terms.

| vLLM field | our meaning |
|---|---|
| `speculative_config["method"] == "medusa"` | trees, in place of vLLM 0.32's chain |
| `speculative_config["model"]` | `MedusaConfig.heads` |
| `speculative_config["num_speculative_tokens"]` | nodes of the tree without its root |
| `additional_config["medusa"]` | the other fields of `MedusaConfig` |
| `worker_cls` | our worker, which brings our model runner |
| result: `method="custom_class"`, `model=PROPOSER` | the public hook of both 0.32 and 0.33 |
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import torch

from medusa_plugin import __version__
from medusa_plugin.config import (
    MedusaConfig,
    MedusaConfigError,
)
from medusa_plugin.embedded import embedded_heads_path, is_embedded_model
from medusa_plugin.heads import HeadsInfo, peek_heads
from medusa_plugin.tree.static import choose_tree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.vllm_glue.cli import METHOD
from medusa_plugin.vllm_glue.support import require_supported_engine

logger = logging.getLogger("vllm.medusa")

PROPOSER = "medusa_plugin.vllm_glue.proposer.MedusaProposer"
CPU_WORKER = "medusa_plugin.vllm_glue.worker.MedusaCPUWorker"
OPTIONS_KEY = "medusa"
HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


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
    if speculative.get("method") != METHOD:
        return
    additional = dict(engine_args.additional_config or {})
    config = _read_options(engine_args.model, speculative, additional.get(OPTIONS_KEY))
    tree = configured_tree(config, peek_heads(config.heads))

    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": tree.num_nodes,
    }
    additional[OPTIONS_KEY] = config.model_dump()
    engine_args.additional_config = additional
    if engine_args.worker_cls not in ("auto", CPU_WORKER):
        raise MedusaConfigError(
            f"--worker-cls {engine_args.worker_cls} and speculative method 'medusa' exclude each "
            "other: medusa brings its own worker"
        )
    engine_args.worker_cls = CPU_WORKER


def finish_engine_config(vllm_config: Any) -> None:
    """Refuse, before weights are loaded, what cannot work with trees yet; log what is on.

    Raises:
        UnsupportedFeatureError: names every feature in the way.
        HeadsError: the heads do not fit the target.
    """
    if not is_medusa(vllm_config.speculative_config):
        return
    config = medusa_config(vllm_config)
    heads = peek_heads(config.heads)
    model_config = vllm_config.model_config
    require_supported_engine(vllm_config)
    heads.require_target(
        hidden_size=model_config.get_hidden_size(), vocab_size=model_config.get_vocab_size()
    )
    tree = configured_tree(config, heads)
    logger.info(
        "medusa %s: heads %s (%s), tree of %d nodes, depth %d, draft vocabulary %s, acceptance "
        "lossless (greedy and sampled); not supported with it: see README, section Support.",
        __version__,
        config.heads,
        heads.describe(),
        tree.num_nodes,
        max(tree.depths),
        config.draft_vocab_size,
    )


def medusa_config(vllm_config: Any) -> MedusaConfig:
    """The validated options that `translate_engine_args` stored in `additional_config`."""
    return MedusaConfig.from_options(vllm_config.additional_config[OPTIONS_KEY])


def configured_tree(config: MedusaConfig, heads: HeadsInfo) -> TokenTree:
    """The topology that `config` asks for on `heads`.

    Raises:
        TreeError: the tree is malformed or needs more heads than there are.
        MedusaConfigError: `num_speculative_tokens` contradicts the size of `tree`.
    """
    wanted = config.num_speculative_tokens
    tree = choose_tree(
        config.tree,
        num_heads=heads.num_heads,
        num_nodes=wanted or default_num_nodes(),
        accuracies=heads.accuracies,
    )
    if wanted is not None and tree.num_nodes != wanted:
        raise MedusaConfigError(
            f"num_speculative_tokens is {wanted}, but the tree has {tree.num_nodes} nodes: leave "
            "num_speculative_tokens out, or give a tree of that size"
        )
    return tree


def default_num_nodes() -> int:
    """Nodes of the default tree: as many as this CPU verifies at little more than one row's cost.

    Measured at batch 1 on SmolLM2-135M, bf16, compiled: with AMX tiles 16 rows cost about 1.1 times
    one row; on a Zen 4 core 6 rows cost as much as one, 8 rows 1.16 times and 16 rows 1.5 times.
    """
    return 15 if torch.cpu._is_amx_tile_supported() else 5


def _speculative_fields(engine_args: Any) -> dict[str, Any]:
    """Speculative options of `EngineArgs` from the dict and its --spec-* aliases."""
    fields = {
        key.replace("-", "_"): value
        for key, value in (engine_args.speculative_config or {}).items()
    }
    for name, alias in (
        ("method", engine_args.spec_method),
        ("model", engine_args.spec_model),
        ("num_speculative_tokens", engine_args.spec_tokens),
    ):
        if alias is not None:
            fields.setdefault(name, alias)
    return fields


def _read_options(model: str, speculative: dict[str, Any], options: Any) -> MedusaConfig:
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise MedusaConfigError(
            f"additional_config[{OPTIONS_KEY!r}] must be a dict of options, got {options!r}"
        )
    given = {key: value for key, value in speculative.items() if key != "method"}
    if "model" in given:
        given["heads"] = given.pop("model")
    for name in given.keys() & options.keys():
        if given[name] != options[name]:
            raise MedusaConfigError(
                f"option {name!r} is {given[name]!r} in speculative_config, but "
                f"{options[name]!r} in additional_config[{OPTIONS_KEY!r}]: give it once"
            )
    merged = {**options, **given}
    if merged.get("heads") is None:
        merged["heads"] = str(find_heads(model))
    return MedusaConfig.from_options(merged)


def find_heads(model: str) -> Path:
    """Heads that belong to `model` beyond doubt: those beside it, or the embedded model's own.

    Raises:
        MedusaConfigError: there are none.
    """
    directory = Path(model)
    for candidate in (directory, directory / "medusa"):
        if any((candidate / name).is_file() for name in HEADS_FILES):
            return candidate
    if is_embedded_model(directory):
        return embedded_heads_path()
    raise MedusaConfigError(
        f"no Medusa heads were named and none lie beside the model {model!r} (looked for "
        f"{' or '.join(HEADS_FILES)} there and in its folder medusa/): give them with "
        "--medusa-heads DIR or speculative_config={'method': 'medusa', 'model': DIR}"
    )
