"""MedusaConfig: every option of the plugin in one frozen, validated object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_NUM_SPECULATIVE_TOKENS = 63


class MedusaConfigError(ValueError):
    """An option is unknown, malformed or contradicts another one; the message names it."""


class MedusaConfig(BaseModel):
    """Options of tree-verified Medusa decoding.

    `heads` and `num_speculative_tokens` are vLLM's own `speculative_config` fields `model` and
    `num_speculative_tokens`; the others are given in `additional_config["medusa"]` or by the
    flag of the same name (`--medusa-tree`, ...).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    heads: str = Field(min_length=1)
    """Directory that holds the heads (`medusa_lm_head.safetensors` or `.pt`, `config.json`)."""

    num_speculative_tokens: int | None = Field(default=None, ge=1, le=MAX_NUM_SPECULATIVE_TOKENS)
    """Most nodes of a tree, root excluded. None: the size of `tree`, else 15."""

    tree: str | list[list[int] | tuple[int, ...]] = "dynamic"
    """"dynamic": each step the most probable nodes by the heads' own probabilities; "static": the
    tree that is best on average under the heads' calibration; or a static tree as
    `medusa_choices`: a list of paths, its text, or a file, spelled as FasterDecoding,
    TensorRT-LLM or RTP-LLM do (`tree/choices.py`)."""

    sizes: Literal["auto", "fixed"] = "auto"
    """"auto": each step as many nodes as pay, by the measured cost of a step, the load and what
    was accepted lately; "fixed": always as many as are allowed."""

    lookup: bool = False
    """Whether candidates from prompt look-up (n-grams of the request's own text) join the trees;
    dynamic trees only."""

    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["auto", "full"] = "auto"
    """How many of the most frequent tokens the heads may propose. "auto": 4096 where the heads
    come with a frequency ranking, otherwise all; "full": all."""

    tuning: bool = True
    """Whether to use what `medusa tune` learnt about the heads, where it did."""

    acceptance: Literal["lossless", "typical"] = "lossless"
    """Rule by which drafts are accepted where a request does not say. "lossless": the output is
    the target's own; "typical": Medusa's rule, LOSSY above temperature 0."""

    typical_epsilon: float = Field(default=0.09, gt=0, lt=1)
    """Probability from which the typical rule accepts a token in any case. Requests may ask for
    typical acceptance, so this and `typical_alpha` count under every `acceptance`."""

    typical_alpha: float = Field(default=0.3, gt=0, allow_inf_nan=False)
    """The typical rule also accepts above alpha * exp(-entropy of the target's distribution)."""

    @model_validator(mode="after")
    def _look_up_needs_dynamic_trees(self) -> MedusaConfig:
        if self.lookup and self.tree != "dynamic":
            raise ValueError(
                "lookup adds branches to dynamic trees: leave 'tree' out, or set 'lookup' to false"
            )
        return self

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> MedusaConfig:
        """Validate `options`.

        Raises:
            MedusaConfigError: names every option that is unknown or has a bad value.
        """
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            raise MedusaConfigError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    known = ", ".join(MedusaConfig.model_fields)
    lines = []
    for item in error.errors():
        if not item["loc"]:  # options that contradict each other
            lines.append(str(item["ctx"]["error"]))
            continue
        name = str(item["loc"][0])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown option {name!r}; the options are: {known}")
        else:
            lines.append(f"option {name!r}: {item['msg']}, got {item['input']!r}")
    return "Medusa configuration: " + "; ".join(dict.fromkeys(lines))
