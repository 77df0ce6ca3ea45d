"""Flags of `vllm serve` and every other parser built on `EngineArgs`."""

from __future__ import annotations

import argparse
from typing import Any

from medusa_plugin.config import MedusaConfigError

METHOD = "medusa"

# Option -> flag; argparse stores it as medusa_<option>.
_FLAGS = {
    "heads": "--medusa-heads",
    "tree": "--medusa-tree",
    "sizes": "--medusa-sizes",
    "lookup": "--medusa-lookup",
    "draft_vocab_size": "--medusa-draft-vocab-size",
    "tuning": "--medusa-tuning",
    "acceptance": "--medusa-acceptance",
    "typical_epsilon": "--medusa-typical-epsilon",
    "typical_alpha": "--medusa-typical-alpha",
    "num_speculative_tokens": "--num-speculative-tokens",
}
_DESTINATIONS = {"speculative_model", *(f"medusa_{option}" for option in _FLAGS)}


def add_arguments(parser: Any) -> Any:
    """Add our group to vLLM's parser once and return the parser.

    Flags that are not given leave no trace in the namespace, since some callers pass all of it on
    as keyword arguments.
    """
    if "--speculative-model" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(
        title="Medusa",
        description="Tree-verified Medusa heads (plugin medusa). Example: "
        "vllm serve MODEL --speculative-model medusa --medusa-heads DIR",
    )
    group.add_argument(
        "--speculative-model",
        choices=[METHOD],
        default=argparse.SUPPRESS,
        help="Speculate with Medusa heads: a tree of candidates is verified in one pass.",
    )
    group.add_argument(
        "--medusa-heads",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="Directory of the heads. Default: the heads beside the model.",
    )
    group.add_argument(
        "--medusa-tree",
        metavar="dynamic|static|CHOICES",
        default=argparse.SUPPRESS,
        help="dynamic (the most probable nodes of each step), static (best on average under the "
        "heads' calibration), or medusa_choices: a text or a file. Default: dynamic.",
    )
    group.add_argument(
        "--medusa-sizes",
        choices=["auto", "fixed"],
        default=argparse.SUPPRESS,
        help="auto: as many nodes as pay, by measured cost, load and acceptance; fixed: always "
        "as many as allowed. Default: auto.",
    )
    group.add_argument(
        "--medusa-lookup",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="Let candidates from the request's own text (n-grams) join the trees, which "
        "must be dynamic. Default: off.",
    )
    group.add_argument(
        "--medusa-draft-vocab-size",
        metavar="N|auto|full",
        type=_vocab_size,
        default=argparse.SUPPRESS,
        help="How many of the most frequent tokens the heads may propose. Default: auto.",
    )
    group.add_argument(
        "--medusa-tuning",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="Use what 'medusa tune' learnt about the heads, where it did. Default: on.",
    )
    group.add_argument(
        "--medusa-acceptance",
        choices=["lossless", "typical"],
        default=argparse.SUPPRESS,
        help="Which drafts are accepted where a request does not say: lossless (the output is the "
        "target's own) or typical (Medusa's rule: more tokens per step, but LOSSY above "
        "temperature 0). Default: lossless.",
    )
    group.add_argument(
        "--medusa-typical-epsilon",
        metavar="P",
        type=float,
        default=argparse.SUPPRESS,
        help="Typical (lossy) acceptance, by default or by request: probability from which a token "
        "is accepted in any case, between 0 and 1. Default: 0.09.",
    )
    group.add_argument(
        "--medusa-typical-alpha",
        metavar="A",
        type=float,
        default=argparse.SUPPRESS,
        help="Typical (lossy) acceptance, by default or by request: also accept above A times "
        "exp(-entropy), above 0. Default: 0.3.",
    )
    group.add_argument(
        "--num-speculative-tokens",
        dest="medusa_num_speculative_tokens",
        metavar="N",
        type=int,
        default=argparse.SUPPRESS,
        help="Most nodes of a tree without its root, 1 to 63. Default: 15.",
    )
    return parser


def _vocab_size(text: str) -> int | str:
    if text in ("auto", "full"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, auto or full, got {text!r}") from None


def apply_arguments(args: argparse.Namespace) -> None:
    """Move our flags into `speculative_config`, in place.

    Raises:
        MedusaConfigError: a --medusa-* flag without --speculative-model medusa, or
            --speculative-model together with another way of configuring speculation.
    """
    method = getattr(args, "speculative_model", None)
    options = {
        option: getattr(args, f"medusa_{option}")
        for option in _FLAGS
        if hasattr(args, f"medusa_{option}")
    }
    if method is None:
        if options:
            flags = ", ".join(_FLAGS[name] for name in options)
            raise MedusaConfigError(
                f"{flags} needs --speculative-model medusa (and neither --speculative-config nor "
                "--spec-method)"
            )
        return
    for flag in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if getattr(args, flag, None) is not None:
            raise MedusaConfigError(
                f"--speculative-model and --{flag.replace('_', '-')} are mutually exclusive; use "
                "--medusa-heads and --num-speculative-tokens with --speculative-model"
            )
    # All in one place, where contradictions with additional_config are noticed.
    args.speculative_config = {"method": METHOD, **options}
    for name in [name for name in vars(args) if name in _DESTINATIONS]:
        delattr(args, name)
