"""Every kind of head that `medusa train` makes, in an engine, against plain vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from medusa_plugin.heads.base import TargetSpec
from medusa_plugin.heads.trained import Kind, TrainedConfig
from medusa_plugin.heads.trained_files import build_trained, save_trained
from tests.engine import harness
from tests.engine.conftest import HIDDEN_SIZE, NUM_HEADS, VOCAB_SIZE

STATIC = [[0], [1], [0, 0], [1, 0], [0, 1], [0, 0, 2]]
TREES = {"dynamic": ("dynamic", harness.MAX_NODES), "static": (STATIC, len(STATIC))}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
}


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine()


def write_heads(directory: Path, kind: Kind, rank: int) -> Path:
    """Random heads that know every second token of the vocabulary."""
    torch.manual_seed(2)
    embedding = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    target = TargetSpec(
        HIDDEN_SIZE, VOCAB_SIZE, embedding, torch.float32, torch.device("cpu"), embedding
    )
    config = TrainedConfig(
        kind=kind,
        num_heads=NUM_HEADS,
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        width=24,
        output_rank=rank,
        draft_vocab_size=VOCAB_SIZE // 2,
    )
    ranking = torch.cat([torch.arange(1, VOCAB_SIZE, 2), torch.arange(0, VOCAB_SIZE, 2)])
    heads = build_trained(config, target, ranking[: VOCAB_SIZE // 2])
    save_trained(directory, config, heads, ranking, torch.float32)
    return directory


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("kind", "rank"), [("conditioned", 0), ("recurrent", 6)])
def test_output_equals_plain(
    plain: Any,
    make_brief_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    rank: int,
    tree: str,
) -> None:
    topology, num_nodes = TREES[tree]
    written = write_heads(tmp_path, kind, rank)
    medusa = make_brief_engine(
        speculative_config=harness.speculation(written, num_speculative_tokens=num_nodes),
        additional_config={"medusa": {"sizes": "fixed", "tree": topology}},
    )
    runner = harness.runner_of(medusa)
    drafter = runner.drafter.drafter
    heads, draft = drafter.heads, drafter.draft
    drafted: list[int] = []
    accepted: list[int] = []

    def watched(step: Any, paths: Any, hidden_states: torch.Tensor) -> Any:
        accepted.extend(len(path.rows) for path in paths)
        trees = draft(step, paths, hidden_states)
        drafted.extend(tree.num_nodes for tree in trees)
        return trees

    monkeypatch.setattr(drafter, "draft", watched)
    assert type(heads).__name__.lower() == f"{kind}heads"
    weight = runner.model.model.embed_tokens.weight
    assert torch.equal(heads.inputs.embedding, weight), "they read the target's own embedding"
    requests = harness.prompts(6, lengths=[3, 20, 70], vocab_size=VOCAB_SIZE, seed=4)
    for params in PARAMS.values():
        expected = harness.answers(plain, requests, params)
        assert harness.answers(medusa, requests, params) == expected
    assert drafted and max(drafted) == num_nodes
    assert sum(accepted) > 0, "by chance some random candidates are right"
