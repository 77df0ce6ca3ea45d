"""Who takes part: plain vLLM, its own ways to speculate, and ours; and how each is started."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medusa_plugin.vllm_glue.offline_engine import EngineSettings

PLAIN, OURS = "plain", "ours"
CHAIN, NGRAM, SUFFIX = "chain", "ngram", "suffix"
NAMES = (PLAIN, CHAIN, NGRAM, SUFFIX, OURS)

# 6 rows cost the CPUs measured so far about as much as one.
NGRAM_CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}
# Nothing is kept of earlier answers: every prompt is asked again and again here, so what is found
# there would be the answer itself.
SUFFIX_CONFIG = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}


class ContenderError(ValueError):
    """An engine was asked for that does not exist or cannot be described; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What is the same for all engines."""

    model: Path
    heads: Path
    eager: bool
    dtype: str
    threads: int
    max_num_seqs: int
    max_model_len: int = 2048
    chain_heads: Path | None = None
    """Plain Medusa heads for vLLM's own chain; None: `heads`."""


@dataclass(frozen=True)
class Contender:
    """One engine: `options` are arguments of `vllm.LLM` beyond those that all share."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    ours: bool = False

    def settings(self, setup: Setup) -> EngineSettings:
        """What to start it with. Where it is not ours, our plugin leaves vLLM untouched."""
        options = {
            "model": str(setup.model),
            "dtype": setup.dtype,
            "enforce_eager": setup.eager,
            "max_model_len": setup.max_model_len,
            "max_num_seqs": setup.max_num_seqs,
            "enable_prefix_caching": False,  # a repeated prompt must cost what it cost first
            "seed": 0,
            **self.options,
        }
        environment = {
            "MEDUSA_DISABLE": "0" if self.ours else "1",
            "OMP_NUM_THREADS": str(setup.threads),
            # vLLM's n-gram proposer sets OpenMP's threads through numba, for torch as well.
            "NUMBA_NUM_THREADS": str(setup.threads),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return EngineSettings(options, environment)


def ours(name: str, heads: Path, options: Mapping[str, Any]) -> Contender:
    """Our engine with `options`: fields of `MedusaConfig`."""
    extra = dict(options)
    speculative = {"method": "medusa", "model": extra.pop("heads", str(heads))}
    if "num_speculative_tokens" in extra:
        speculative["num_speculative_tokens"] = extra.pop("num_speculative_tokens")
    engine: dict[str, Any] = {"speculative_config": speculative}
    if extra:
        engine["additional_config"] = {"medusa": extra}
    return Contender(name, engine, ours=True)


def static_trees(heads: Path, sizes: Sequence[int]) -> list[Contender]:
    """Ours with trees that never change: the best of each size under the heads' calibration.

    Raises:
        ContenderError: a size is out of range.
    """
    from medusa_plugin.heads import peek_heads
    from medusa_plugin.tree.static import STATIC, choose_tree
    from medusa_plugin.tree.token_tree import TreeError

    info = peek_heads(heads)
    contenders = []
    for size in sizes:
        try:
            tree = choose_tree(
                STATIC, num_heads=info.num_heads, num_nodes=size, accuracies=info.accuracies
            )
        except TreeError as error:
            raise ContenderError(f"--static-sizes {size}: {error}") from None
        options = {"tree": tree.choices, "sizes": "fixed"}
        contenders.append(ours(f"static-{size}", heads, options))
    return contenders


def parse_variant(text: str, heads: Path) -> Contender:
    """Ours as `NAME=JSON` describes it, JSON being an object of options.

    Raises:
        ContenderError: says what is expected.
    """
    name, separator, options = text.partition("=")
    try:
        parsed = json.loads(options) if separator else None
    except ValueError as error:
        raise ContenderError(f"--variant {text}: {error}") from None
    if not name or not isinstance(parsed, dict):
        raise ContenderError(
            f'--variant {text}: expected NAME=JSON, e.g. wide={{"num_speculative_tokens": 15}}'
        )
    return ours(name, heads, parsed)


def contenders(
    names: Sequence[str], variants: Sequence[Contender], setup: Setup, scratch: Path
) -> tuple[list[Contender], dict[str, str]]:
    """The engines called `names` and the variants, and why one cannot take part, by its name.

    Args:
        names: of `NAMES`; plain takes part in any case, as everything is compared with it.
        variants: more engines of ours.
        setup: whose model and heads are used.
        scratch: directory for the heads as vLLM's chain wants them.

    Raises:
        ContenderError: a name is unknown or given twice.
    """
    wanted = list(dict.fromkeys((PLAIN, *names)))
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ContenderError(f"no engine {unknown[0]!r}: there are {', '.join(NAMES)}")
    taken = [*wanted, *(variant.name for variant in variants)]
    twice = next((name for name in taken if taken.count(name) > 1), None)
    if twice is not None:
        raise ContenderError(f"two engines are called {twice!r}: name the variant otherwise")
    found: list[Contender] = []
    missing: dict[str, str] = {}
    for name in wanted:
        made = _make(name, setup, scratch)
        if isinstance(made, str):
            missing[name] = made
        else:
            found.append(replace(made, name=name))
    return [*found, *variants], missing


def _make(name: str, setup: Setup, scratch: Path) -> Contender | str:
    """The engine, or why it cannot take part."""
    if name == CHAIN:
        return _chain(setup, scratch)
    if name == NGRAM:
        return Contender(name, {"speculative_config": NGRAM_CONFIG})
    if name == SUFFIX:
        if importlib.util.find_spec("arctic_inference") is None:
            return "the package arctic-inference is not installed"
        return Contender(name, {"speculative_config": SUFFIX_CONFIG})
    return ours(name, setup.heads, {}) if name == OURS else Contender(name)


def _chain(setup: Setup, scratch: Path) -> Contender | str:
    from decode.chain_heads import export_chain_heads
    from medusa_plugin.heads import HeadsError

    try:
        length = export_chain_heads(setup.chain_heads or setup.heads, setup.model, scratch)
    except HeadsError as error:
        return f"vLLM's chain cannot use these heads: {error}"
    speculative = {"method": "medusa", "model": str(scratch), "num_speculative_tokens": length}
    return Contender(
        CHAIN,
        {
            "speculative_config": speculative,
            # vLLM 0.32 takes its own `token_map` for a weight that was not loaded.
            "model_loader_extra_config": {"enable_weights_track": False},
        },
    )
