"""The training loop: deterministic, and resumed after a kill as if nothing had happened."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from medusa_plugin.training.examples import Batch, Examples
from medusa_plugin.training.loss import Objective, TrainableHeads, head_logits
from medusa_plugin.training.texts import TrainingError

MAX_BAD_STEPS = 20
"""So many steps in a row without a finite gradient end the run."""
_MAX_GRADIENT_NORM = 1.0
_TOP = (1, 2, 4, 8)
"""Ranks by which accuracy is reported."""


@dataclass(frozen=True)
class FitOptions:
    """How to train."""

    epochs: int = 4
    learning_rate: float = 2e-3
    warm_up_steps: int = 200
    weight_decay: float = 0.01
    bf16: bool = True
    """Whether products are computed in bfloat16; weights stay float32."""
    evaluate_every: int = 400
    """Steps."""
    patience: int = 6
    """Evaluations without a better held-out loss before training ends."""
    checkpoint_seconds: float = 120.0
    budget_seconds: float | None = None
    """The learning rate then falls with time; training ends after so long, or all epochs."""
    seed: int = 0


@dataclass
class Evaluation:
    """Of held-out examples, all tokens before being the true ones."""

    step: int
    examples: int
    """Seen in training."""
    seconds: float
    train_loss: float
    """Mean since the evaluation before."""
    loss: float
    """Weighted over the heads, as in training."""
    accuracy: list[list[float]]
    """`[num_heads][4]` how often the true token is among the 1, 2, 4, 8 best; a token outside the
    draft vocabulary is a miss."""


@dataclass
class FitState:
    """Where training stands."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Of the epoch: the next one."""
    examples: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_steps: int = 0
    """Since the last evaluation."""
    bad_steps: int = 0
    """In a row, whose gradient was not finite."""
    skipped_steps: int = 0
    """The same, ever."""
    best_loss: float = math.inf
    best_step: int = 0
    ended: str = ""
    """Why training has ended; empty while it has not."""
    evaluations: list[Evaluation] = field(default_factory=list)


class Trainer:
    """Trains heads of any kind.

    Under torchrun every process sees the whole batch's order and computes its share of it.

    Args:
        heads: a module of float32 weights; changed in place.
        objective: the loss.
        examples: to train on.
        held_out: batches that decide which weights are best.
        options: how.
        checkpoint: file of the state, made and read.
    """

    def __init__(
        self,
        heads: nn.Module,
        objective: Objective,
        examples: Examples,
        held_out: Sequence[Batch],
        options: FitOptions,
        checkpoint: Path,
    ) -> None:
        if not len(examples):
            raise TrainingError("no answer has two tokens: there is nothing to learn from")
        self.heads = heads
        self.state = FitState()
        self._objective = objective
        self._examples = examples
        self._held_out = held_out
        self._options = options
        self._checkpoint = checkpoint
        self._parameters = [p for p in heads.parameters() if p.requires_grad]
        self._device = self._parameters[0].device
        self._optimiser = torch.optim.AdamW(
            self._parameters,
            lr=options.learning_rate,
            weight_decay=options.weight_decay,
            betas=(0.9, 0.98),
            fused=True,
        )
        self._total_steps = sum(examples.num_batches(epoch) for epoch in range(options.epochs))
        self._best = _copy(heads)
        self._parallel = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if self._parallel else 0
        self._world = dist.get_world_size() if self._parallel else 1
        self._fingerprint = self._settings_hash()
        if checkpoint.exists():
            self._load()

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        by_steps = self.state.step / self._total_steps
        budget = self._options.budget_seconds
        return min(1.0, by_steps if budget is None else max(by_steps, self.state.seconds / budget))

    def run(self, report: Callable[[FitState, float], None] | None = None) -> FitState:
        """Train to the end and leave the best weights in the heads.

        Args:
            report: told after each step where training stands, and the loss of the step.

        Raises:
            TrainingError: many steps in a row had no finite gradient.
        """
        torch.manual_seed(self._options.seed)
        started, saved = time.monotonic() - self.state.seconds, time.monotonic()
        for batch in self._batches():
            loss = self._step(batch)
            self.state.seconds = self._agree(time.monotonic() - started)
            if self.state.step % self._options.evaluate_every == 0:
                self._evaluate()
            if report is not None:
                report(self.state, loss)
            if self.state.ended or self.progress >= 1:
                break
            if time.monotonic() - saved > self._options.checkpoint_seconds:
                self.save()
                saved = time.monotonic()
        if not self.state.ended:
            if not self.state.evaluations or self.state.evaluations[-1].step != self.state.step:
                self._evaluate()
            self.state.ended = self.state.ended or "all epochs done, or the budget"
            self.save()
        self.heads.load_state_dict(self._best)
        return self.state

    def _batches(self) -> Iterator[Batch]:
        state = self.state
        while state.epoch < self._options.epochs and not state.ended:
            for batch in self._examples.batches(state.epoch, state.batch):
                state.batch += 1
                yield batch
            state.epoch, state.batch = state.epoch + 1, 0

    def _step(self, whole: Batch) -> float:
        """One step of the optimiser, or none where the gradient is not finite."""
        state = self.state
        for group in self._optimiser.param_groups:
            group["lr"] = self._learning_rate()
        self._optimiser.zero_grad(set_to_none=True)
        batch = whole.part(self._rank, self._world).to(self._device)
        with self._autocast():
            sums, _ = self._objective.sums(_trainable(self.heads), batch)
        counts = (self._objective.labels(whole.to(self._device)) >= 0).sum(0).clamp(min=1)
        weights = self._objective.weights(len(sums)).to(self._device)
        loss = (weights * sums / counts).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        value = self._sum_gradients(loss.detach())
        norm = nn.utils.clip_grad_norm_(self._parameters, _MAX_GRADIENT_NORM)
        state.step += 1
        state.examples += len(whole.roots)
        if not (math.isfinite(value) and bool(torch.isfinite(norm))):
            state.bad_steps += 1
            state.skipped_steps += 1
            if state.bad_steps >= MAX_BAD_STEPS:
                raise TrainingError(
                    f"{state.bad_steps} steps in a row, up to step {state.step}, had a loss or "
                    "gradient that is not finite: lower --lr, or take --dtype float32"
                )
            return value
        state.bad_steps = 0
        state.loss_sum += value
        state.loss_steps += 1
        self._optimiser.step()
        return value

    def _learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a hundredth."""
        options = self._options
        warm = min(options.warm_up_steps, max(1, self._total_steps // 10))
        rise = min(1.0, (self.state.step + 1) / warm)
        fall = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.progress))
        return options.learning_rate * rise * fall

    def _sum_gradients(self, loss: torch.Tensor) -> float:
        """Over all processes, in place; returns the whole batch's loss."""
        if self._parallel:
            gradients = [_gradient(parameter) for parameter in self._parameters]
            flat = torch.cat([loss.reshape(1), *(grad.reshape(-1) for grad in gradients)])
            dist.all_reduce(flat)
            place = 1
            for grad in gradients:
                grad.copy_(flat[place : place + grad.numel()].view_as(grad))
                place += grad.numel()
            loss = flat[0]
        return float(loss)

    def _agree(self, seconds: float) -> float:
        """The first process's clock, so that all end at the same step."""
        if not self._parallel:
            return seconds
        shared = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.broadcast(shared, 0)
        return float(shared)

    def _evaluate(self) -> None:
        state = self.state
        with self._autocast():
            loss, accuracy = evaluate(_trainable(self.heads), self._objective, self._held_out)
        train_loss = state.loss_sum / max(1, state.loss_steps)
        state.loss_sum, state.loss_steps = 0.0, 0
        state.evaluations.append(
            Evaluation(state.step, state.examples, state.seconds, train_loss, loss, accuracy)
        )
        if loss < state.best_loss:
            state.best_loss, state.best_step = loss, state.step
            self._best = _copy(self.heads)
        elif sum(e.step > state.best_step for e in state.evaluations) >= self._options.patience:
            state.ended = "the held-out loss no longer fell"
            self.save()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._options.bf16)

    def save(self) -> None:
        """Put everything into the checkpoint, whole or not at all."""
        if self._rank:
            return
        partial = self._checkpoint.with_suffix(".part")
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "settings": self._fingerprint,
                "state": asdict(self.state),
                "heads": self.heads.state_dict(),
                "best": self._best,
                "optimiser": self._optimiser.state_dict(),
            },
            partial,
        )
        partial.replace(self._checkpoint)

    def _load(self) -> None:
        try:
            saved: dict[str, Any] = torch.load(
                self._checkpoint, map_location=self._device, weights_only=True
            )
        except Exception as error:  # a damaged file fails in whatever way its bytes lead to
            raise TrainingError(f"{self._checkpoint} cannot be read: delete it ({error})") from None
        if saved["settings"] != self._fingerprint:
            raise TrainingError(
                f"{self._checkpoint} is of a training with other options or other text: give "
                "another --out, or delete it to begin anew"
            )
        evaluations = [Evaluation(**entry) for entry in saved["state"].pop("evaluations")]
        self.state = FitState(**saved["state"], evaluations=evaluations)
        self.heads.load_state_dict(saved["heads"])
        self._best = saved["best"]
        self._optimiser.load_state_dict(saved["optimiser"])

    def _settings_hash(self) -> str:
        options = {**asdict(self._options), "checkpoint_seconds": 0}
        shapes = {name: list(t.shape) for name, t in self.heads.state_dict().items()}
        told = f"{options} {shapes} {self._examples.fingerprint} {self._objective.decay} "
        told += f"{self._objective.distill} {type(self.heads).__name__}"
        return hashlib.sha256(told.encode()).hexdigest()


@torch.no_grad()
def evaluate(
    heads: TrainableHeads, objective: Objective, batches: Sequence[Batch]
) -> tuple[float, list[list[float]]]:
    """The loss as in training, and accuracies as in `Evaluation`."""
    sums = counts = known = torch.zeros(())
    hits: torch.Tensor = torch.zeros(())
    for batch in batches:
        batch = batch.to(objective.columns.device)
        batch_sums, batch_counts = objective.sums(heads, batch)
        sums, counts = sums + batch_sums.cpu(), counts + batch_counts.cpu()
        known = known + (batch.futures >= 0).sum(0).cpu()
        labels = objective.labels(batch)
        found = []
        for head, logits in enumerate(head_logits(heads, batch)):
            most = min(_TOP[-1], logits.shape[1])
            right = logits.topk(most, -1).indices == labels[:, head, None]
            found.append([int(right[:, :top].sum()) for top in _TOP])
        hits = hits + torch.tensor(found)
    weights = objective.weights(len(sums))
    loss = float((weights * sums / counts.clamp(min=1)).sum())
    return loss, (hits / known.clamp(min=1)[:, None]).tolist()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, 0 where the loss did not depend on it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _copy(heads: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in heads.state_dict().items()}


def _trainable(heads: Any) -> TrainableHeads:
    """The same object; a module that has what heads in training need."""
    trainable: TrainableHeads = heads
    return trainable
