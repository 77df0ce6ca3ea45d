"""Training: what is learnt, from which labels; a killed run goes on as if it had not been."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medusa_plugin.training.examples import (
    NO_TOKEN,
    Batch,
    Examples,
    Rows,
    measure_inputs,
    rank_tokens,
    sample,
)
from medusa_plugin.training.fit import MAX_BAD_STEPS, FitOptions, FitState, Trainer, evaluate
from medusa_plugin.training.loss import Objective, columns_of
from medusa_plugin.training.setup import Shape, fresh_heads, objective_of
from medusa_plugin.training.texts import TrainingError
from tests.training import toy

KINDS = ("medusa", "conditioned", "recurrent")
OPTIONS = FitOptions(epochs=2, warm_up_steps=5, bf16=False, evaluate_every=7, patience=99)


def shape_of(kind: Any, draft_vocab_size: int = toy.VOCAB_SIZE) -> Shape:
    return Shape(kind, 3, width=64, output_rank=24, draft_vocab_size=draft_vocab_size)


def make_trainer(
    folder: Path, kind: str, options: FitOptions = OPTIONS, *, distill: float = 0.0, **shape: int
) -> Trainer:
    """A trainer of the toy text in `folder`, which is read if it is there."""
    folder.mkdir(exist_ok=True)
    shards = [toy.shard(folder / f"{i}", toy.lawful_answers(40, 12, seed=i)) for i in range(6)]
    held_out = [toy.shard(folder / "held_out", toy.lawful_answers(20, 12, seed=77))]
    ranked = rank_tokens(shards, toy.VOCAB_SIZE)
    made = shape_of(kind, **shape)
    later = bool(distill)
    heads = fresh_heads(made, toy.target(), ranked, measure_inputs(shards), seed=1)
    objective = objective_of(made, toy.target(), ranked, decay=0.9, distill=distill)
    return Trainer(
        heads,
        objective,
        Examples(shards, 3, 128, seed=2, later=later),
        sample(held_out, 3, 1000, 0, later=later),
        options,
        folder / "fit.pt",
    )


def test_examples_end_with_their_answer(tmp_path: Path) -> None:
    shard = toy.shard(tmp_path / "s", [[1, 2, 3, 4], [5], [6, 7]])
    rows = Rows([shard])
    assert rows.usable().tolist() == [0, 1, 2, 5]
    batch = rows.batch(torch.tensor([0, 1, 2, 5]), 3, later=True)
    assert batch.roots.tolist() == [1, 2, 3, 6]
    assert batch.futures.tolist() == [
        [2, 3, 4],
        [3, 4, NO_TOKEN],
        [4, NO_TOKEN, NO_TOKEN],
        [7, NO_TOKEN, NO_TOKEN],
    ]
    assert batch.later is not None
    assert torch.equal(batch.later[0], rows.hidden[1:4])


def test_every_example_comes_once_an_epoch_and_from_any_batch_on(tmp_path: Path) -> None:
    shards = [toy.shard(tmp_path / f"{i}", [[i, j, i, j] for j in range(10 + i)]) for i in range(9)]
    examples = Examples(shards, 2, 7, seed=4)

    def rows(epoch: int, first: int = 0) -> list[list[int]]:
        batches = list(examples.batches(epoch, first))
        assert len(batches) == examples.num_batches(epoch) - first
        return [[*b.roots[i : i + 1].tolist(), *b.futures[i].tolist()] for b in batches
                for i in range(len(b.roots))]  # fmt: skip

    everything = sorted(row for s in shards for row in _rows_of(s))
    assert sorted(rows(0)) == sorted(rows(1)) == everything
    assert rows(0) != rows(1)
    whole = list(examples.batches(1))
    for first in (1, 17, len(whole) - 1):
        later = list(examples.batches(1, first))
        assert all(
            torch.equal(a.hidden, b.hidden) for a, b in zip(whole[first:], later, strict=True)
        )


def _rows_of(shard: Any) -> list[list[int]]:
    rows = Rows([shard])
    batch = rows.batch(rows.usable(), 2)
    return torch.cat([batch.roots[:, None], batch.futures], 1).tolist()


class Fixed(nn.Module):
    """Heads with the same logits for every example."""

    num_heads = 2

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def all_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.logits[:, None].expand(-1, len(hidden), -1)


def test_loss_and_accuracy_by_hand() -> None:
    """Tokens outside the draft vocabulary do not train, but count as misses."""
    heads = Fixed(torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 0.0]]))
    objective = Objective(columns_of(torch.tensor([10, 11, 12]), 20), decay=0.5)
    futures = torch.tensor([[10, 11], [12, 9], [9, NO_TOKEN], [10, NO_TOKEN]])
    batch = Batch(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), futures)
    assert objective.labels(batch).tolist() == [[0, 1], [2, -1], [-1, -1], [0, -1]]
    sums, counts = (t.detach() for t in objective.sums(heads, batch))
    first, second = heads.logits.detach().log_softmax(-1)
    torch.testing.assert_close(sums, torch.stack([-2 * first[0] - first[2], -second[1]]))
    assert counts.tolist() == [3, 1]
    loss, accuracy = evaluate(heads, objective, [batch])
    mean = (sums[0] / 3 + 0.5 * sums[1]) / 1.5
    assert loss == pytest.approx(float(mean.detach()))
    # Head 0: two hits at rank 1 and one at rank 2 of four; head 1: one of two.
    assert [row[:2] for row in accuracy] == [[0.5, 0.75], [0.5, 0.5]]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_reaches_every_parameter_of_every_head(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind)
    trainer.run()
    before = {name: p.detach().clone() for name, p in trainer.heads.named_parameters()}
    sums, _ = trainer._objective.sums(trainer.heads, trainer._held_out[0])  # type: ignore[arg-type]
    for head, summed in enumerate(sums):
        trainer.heads.zero_grad()
        summed.backward(retain_graph=True)
        for name, p in trainer.heads.named_parameters():
            grad = p.grad if p.grad is not None else torch.zeros_like(p)
            if name in ("weight", "bias", "heads", "biases"):
                assert grad[head].abs().max() > 0, name
            elif name != "recur.weight" or head:
                assert grad.abs().max() > 0, name
    assert len(before) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_lawful_text_is_learnt(kind: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=12, learning_rate=1e-2, evaluate_every=60)
    state = make_trainer(tmp_path, kind, options).run()
    accuracy = [row[0] for row in state.evaluations[-1].accuracy]
    assert state.evaluations[-1].examples == 12 * 6 * 40 * 11
    assert min(accuracy) > (0.9 if kind == "medusa" else 0.99), accuracy


@pytest.mark.parametrize("kind", ["recurrent", "conditioned"])
def test_distilled_heads_approach_the_targets_distribution(kind: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=6, learning_rate=1e-2)
    state = make_trainer(tmp_path, kind, options, distill=1.0).run()
    assert state.evaluations[-1].loss < 0.2 * state.evaluations[0].loss


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 7, 15, 33])
def test_a_killed_run_goes_on_bit_for_bit(kind: str, step: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint_seconds=0)  # after every step
    whole = make_trainer(tmp_path / "whole", kind, options)
    whole_state = whole.run()

    def kill(state: FitState, loss: float) -> None:
        if state.step == step:
            raise Killed

    with pytest.raises(Killed):
        make_trainer(tmp_path / "killed", kind, options).run(kill)
    again = make_trainer(tmp_path / "killed", kind, options)
    assert again.state.step == step - 1
    state = again.run()
    assert state.step == whole_state.step
    for mine, theirs in zip(state.evaluations, whole_state.evaluations, strict=True):
        assert replace(mine, seconds=0) == replace(theirs, seconds=0)
    for name, tensor in whole.heads.state_dict().items():
        assert torch.equal(tensor, again.heads.state_dict()[name]), name


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, "conditioned")
    steps = first.run().step
    second = make_trainer(tmp_path, "conditioned")
    assert second.run(lambda *_: pytest.fail("trained")).step == steps
    for name, tensor in first.heads.state_dict().items():
        assert torch.equal(tensor, second.heads.state_dict()[name])


def test_other_options_refuse_the_checkpoint(tmp_path: Path) -> None:
    make_trainer(tmp_path, "conditioned").run()
    with pytest.raises(TrainingError, match="other options"):
        make_trainer(tmp_path, "conditioned", replace(OPTIONS, learning_rate=1e-4))
    (tmp_path / "fit.pt").write_bytes(b"torn")
    with pytest.raises(TrainingError, match="cannot be read"):
        make_trainer(tmp_path, "conditioned")


def test_training_ends_when_held_out_loss_rises_and_keeps_the_best(tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=40, patience=2, learning_rate=1.0, warm_up_steps=1)
    trainer = make_trainer(tmp_path, "conditioned", options)
    state = trainer.run()
    assert "no longer fell" in state.ended
    loss, _ = evaluate(trainer.heads, trainer._objective, trainer._held_out)  # type: ignore[arg-type]
    assert loss == pytest.approx(state.best_loss)


def test_a_step_without_a_finite_gradient_changes_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "recurrent")
    batch = trainer._held_out[0]
    poisoned = replace(batch, hidden=torch.full_like(batch.hidden, torch.inf))
    before = {name: p.clone() for name, p in trainer.heads.state_dict().items()}
    trainer._step(poisoned)
    assert trainer.state.skipped_steps == 1
    for name, tensor in trainer.heads.state_dict().items():
        assert torch.equal(tensor, before[name])
    trainer._step(batch)
    assert trainer.state.bad_steps == 0
    with pytest.raises(TrainingError, match="not finite"):
        for _ in range(MAX_BAD_STEPS):
            trainer._step(poisoned)


def test_a_budget_ends_training(tmp_path: Path) -> None:
    options = replace(OPTIONS, epochs=10_000, budget_seconds=0.5)
    state = make_trainer(tmp_path, "conditioned", options).run()
    assert 0.5 <= state.seconds < 3


WORKER = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from tests.training.test_fit import make_trainer
torch.set_num_threads(1)
dist.init_process_group("gloo")
trainer = make_trainer(Path(sys.argv[1]) / str(dist.get_rank()), "recurrent")
trainer.run()
torch.save(trainer.heads.state_dict(), f"{sys.argv[1]}/weights-{dist.get_rank()}.pt")
"""


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "worker.py"), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**__import__("os").environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone = make_trainer(tmp_path / "alone", "recurrent")
    alone.run()
    first, second = (torch.load(tmp_path / f"weights-{i}.pt") for i in range(2))
    for name, tensor in alone.heads.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-3, atol=1e-4)


def test_heads_that_read_tokens_are_fed_the_true_ones(tmp_path: Path) -> None:
    """Every second token is random, and the one after it follows from it alone."""
    generator = torch.Generator().manual_seed(5)
    half = toy.VOCAB_SIZE // 2
    pairs = torch.randint(half, (240, 6), generator=generator).tolist()
    answers = [[token for r in row for token in (r, r + half)] for row in pairs]
    shards = [toy.shard(tmp_path / "train", answers[40:])]
    held_out = [toy.shard(tmp_path / "held_out", answers[:40])]
    ranked = rank_tokens(shards, toy.VOCAB_SIZE)
    made = shape_of("recurrent")
    trainer = Trainer(
        fresh_heads(made, toy.target(), ranked, measure_inputs(shards), seed=1),
        objective_of(made, toy.target(), ranked, decay=0.9, distill=0.0),
        Examples(shards, 3, 128, seed=2),
        sample(held_out, 3, 1000, 0),
        replace(OPTIONS, epochs=20, learning_rate=1e-2, evaluate_every=1000),
        tmp_path / "fit.pt",
    )
    accuracy = [row[0] for row in trainer.run().evaluations[-1].accuracy]
    assert min(accuracy) > 0.4, accuracy  # about half of each head's tokens can be known
