"""From texts to heads on disk; each stage goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from medusa_plugin import __version__
from medusa_plugin.atomic_file import write_whole
from medusa_plugin.heads import load_heads, peek_heads
from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.heads.tuning import MeasuredOn, write_tuning
from medusa_plugin.training.calibrate import tuning_of
from medusa_plugin.training.evaluate import HeldOut, evaluate_held_out
from medusa_plugin.training.examples import Examples, measure_inputs, rank_tokens, sample
from medusa_plugin.training.fit import FitOptions, FitState, Trainer
from medusa_plugin.training.hidden_states import Progress, Shard, bytes_needed, extract
from medusa_plugin.training.setup import Shape, fresh_heads, objective_of, save_heads
from medusa_plugin.training.target import Target
from medusa_plugin.training.texts import Text, TrainingError, split

HELD_OUT_EXAMPLES = 16384
"""By which the best weights are chosen."""


@dataclass(frozen=True)
class Plan:
    """What to train, and from what."""

    model: str
    out: Path
    shape: Shape
    fit: FitOptions
    batch_size: int = 1024
    decay: float = 0.9
    distill: float = 0.0
    target_dtype: torch.dtype = torch.bfloat16
    """In which the target computes hidden states."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def work(self) -> Path:
        """Directory of all that is not needed once the heads are made."""
        return self.out / "work"


def require_same_text(plan: Plan, settings: Mapping[str, Any]) -> None:
    """Note in the work directory how its text is made.

    Args:
        plan: what to train.
        settings: that decide about the text; of JSON's types.

    Raises:
        TrainingError: an earlier run there made its text in another way.
    """
    file = plan.work / "text.json"
    wanted = json.dumps({"model": plan.model, "seed": plan.fit.seed, **settings}, indent=1)
    if file.exists() and (found := file.read_text(encoding="utf-8")) != wanted:
        raise TrainingError(
            f"{plan.work} holds text made in another way ({found}), now asked for: {wanted}: give "
            f"another --out, or delete {plan.work}"
        )
    write_whole(file, wanted)


@dataclass(frozen=True)
class HiddenStates:
    """Both parts of the data, on disk, and what of the target is still needed."""

    train: list[Shard]
    held_out: list[Shard]
    target: TargetSpec

    @property
    def train_tokens(self) -> int:
        """Answer tokens to train on."""
        return sum(shard.rows for shard in self.train)

    @property
    def held_out_tokens(self) -> int:
        """Answer tokens held out."""
        return sum(shard.rows for shard in self.held_out)


def make_hidden_states(
    plan: Plan,
    texts: Sequence[Text],
    progress: Progress | None = None,
    on_estimate: Callable[[int], None] | None = None,
) -> HiddenStates:
    """Run the target over all texts, as far as that has not been done.

    Under torchrun the first process computes, the others wait and then find everything there.

    Args:
        plan: what to train.
        texts: to learn from.
        progress: told of tokens.
        on_estimate: told the bytes on disk that the hidden states take, before they are made.

    Raises:
        TrainingError: see `split`, `Target` and `extract`.
    """
    train, held_out = split(texts)
    target = Target(plan.model, plan.target_dtype, plan.device)
    hidden_size = int(target.config.hidden_size)
    if on_estimate is not None:
        on_estimate(bytes_needed([*train, *held_out], hidden_size))
    if dist.is_initialized() and dist.get_rank():
        dist.barrier()
    first = sum(len(text.token_ids) for text in held_out)
    whole = first + sum(len(text.token_ids) for text in train)
    report = progress or (lambda done, total: None)
    folder = plan.work / "hidden_states"
    held_out_shards = extract(
        target, held_out, folder / "held_out", lambda done, _: report(done, whole)
    )
    train_shards = extract(
        target, train, folder / "train", lambda done, _: report(first + done, whole)
    )
    if dist.is_initialized() and not dist.get_rank():
        dist.barrier()
    return HiddenStates(train_shards, held_out_shards, target.spec())


def train_heads(
    plan: Plan,
    data: HiddenStates,
    report: Callable[[FitState, float, float], None] | None = None,
) -> FitState:
    """Train heads and write them to `plan.out`.

    Args:
        plan: what to train.
        data: to learn from.
        report: told after each step where training stands, from 0 to 1, and the step's loss.

    Raises:
        TrainingError: see `Trainer`.
    """
    ranked = rank_tokens(data.train, data.target.vocab_size)
    shape = replace(plan.shape, draft_vocab_size=min(plan.shape.draft_vocab_size, len(ranked)))
    statistics = measure_inputs(data.train)
    heads = fresh_heads(shape, data.target, ranked, statistics, plan.fit.seed)
    objective = objective_of(shape, data.target, ranked, decay=plan.decay, distill=plan.distill)
    later = bool(plan.distill)
    seed, count = plan.fit.seed, shape.num_heads
    examples = Examples(data.train, count, plan.batch_size, seed, later=later)
    held_out = sample(data.held_out, count, HELD_OUT_EXAMPLES, seed, later=later)
    if not held_out:
        raise TrainingError("no held-out answer has two tokens: give more text")
    trainer = Trainer(heads, objective, examples, held_out, plan.fit, plan.work / "fit.pt")
    state = trainer.run(
        None if report is None else lambda state, loss: report(state, trainer.progress, loss)
    )
    if not dist.is_initialized() or not dist.get_rank():
        save_heads(plan.out, shape, data.target, heads, ranked, Path(plan.model).name)
        write_whole(plan.out / "training.json", json.dumps(asdict(state), indent=1) + "\n")
    return state


def evaluate_heads(plan: Plan, data: HiddenStates) -> HeldOut:
    """Judge the heads in `plan.out`, as they are served, in float32 on the CPU.

    What is learnt of their probabilities is written beside them, for dynamic and static trees.

    Raises:
        TrainingError: too few held-out answers are longer than there are heads.
    """
    cpu, target = torch.device("cpu"), data.target
    assert target.embedding is not None
    target = replace(
        target,
        dtype=torch.float32,
        device=cpu,
        lm_head=target.lm_head.to(cpu, torch.float32),
        embedding=target.embedding.to(cpu, torch.float32),
    )
    vocab_size = min(plan.shape.draft_vocab_size, target.vocab_size)
    heads = load_heads(plan.out, target, draft_vocab_size=vocab_size)
    try:
        judged = evaluate_held_out(heads, data.held_out, torch.float32)
    except ValueError as error:
        raise TrainingError(f"too little held-out text: {error}; raise --tokens") from error
    weights = peek_heads(plan.out, use_tuning=False).path
    measured_on = MeasuredOn(
        model=Path(plan.model).name if Path(plan.model).is_dir() else plan.model,
        prompts="held out in training",
        num_prompts=judged.answers,
        num_tokens=judged.tokens,
        dtype="float32",
        medusa=__version__,
    )
    tuning = tuning_of(judged.fits, judged.accuracies, weights, vocab_size, measured_on)
    write_tuning(tuning, weights, plan.out)
    return judged
