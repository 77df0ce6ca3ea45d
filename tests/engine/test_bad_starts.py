"""Starts that cannot work end with the reason, beside an engine that goes on; unusual ones work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from medusa_plugin.config import MedusaConfigError
from medusa_plugin.heads import HeadsError
from medusa_plugin.tree.token_tree import TreeError
from tests.engine import harness
from tests.engine.conftest import HIDDEN_SIZE, VOCAB_SIZE, engine_maker, start_engine

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WEIGHTS = "medusa_lm_head.safetensors"


@pytest.fixture(scope="module")
def living(make_engine: Any, random_heads: Path) -> tuple[Any, list[tuple[int, ...]]]:
    """An engine, and what it answers."""
    engine = make_engine(speculative_config={"method": "medusa", "model": str(random_heads)})
    return engine, harness.texts(engine, [[1, 2, 3], [4, 5]], PARAMS)


def with_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        half = HIDDEN_SIZE // 2
        tensors[name] = (tensor[:half, :half] if tensor.dim() == 2 else tensor[:half]).contiguous()


def own_lm_heads(tensors: dict[str, torch.Tensor]) -> None:
    for head in range(4):
        tensors[f"{head}.1.weight"] = torch.zeros(VOCAB_SIZE + 8, HIDDEN_SIZE)


DAMAGES: dict[str, tuple[Any, str]] = {
    "cut": (lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-9]), WEIGHTS),
    "magic": (lambda d: (d / WEIGHTS).write_bytes(b"GGUF" + bytes(999)), WEIGHTS),
    "missing": (lambda d: with_tensors(d, lambda t: t.pop("1.0.linear.bias")), "1.0.linear.bias"),
    "surplus": (
        lambda d: with_tensors(d, lambda t: t.update({"norm.weight": torch.zeros(4)})),
        "norm.weight",
    ),
    "hydra": (
        lambda d: with_tensors(d, lambda t: t.update({"hydra_mlp.0.weight": torch.zeros(4, 4)})),
        "hydra_mlp.0.weight",
    ),
    "dtype": (
        lambda d: with_tensors(
            d, lambda t: t.update({"0.0.linear.bias": torch.zeros(HIDDEN_SIZE).double()})
        ),
        "F64",
    ),
    "hidden": (lambda d: with_tensors(d, narrower), "hidden size 32, but the target has 64"),
    "vocabulary": (
        lambda d: with_tensors(d, own_lm_heads),
        f"vocabulary of {VOCAB_SIZE + 8}, but the target has {VOCAB_SIZE}",
    ),
    "deep config": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json"),
    "tuning": (lambda d: (d / "tuning.json").write_text("{}"), "tuning.json"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "holds no Medusa heads"),
    "no directory": (lambda d: shutil.rmtree(d), "no directory of Medusa heads"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_heads(
    make_engine: Any, random_heads: Path, living: Any, tmp_path: Path, damage: str
) -> None:
    heads = tmp_path / "heads"
    shutil.copytree(random_heads, heads)
    change, message = DAMAGES[damage]
    change(heads)
    with pytest.raises(HeadsError) as caught:
        make_engine(speculative_config={"method": "medusa", "model": str(heads)})
    assert message in str(caught.value) and str(heads) in str(caught.value)
    engine, answers = living
    assert harness.texts(engine, [[1, 2, 3], [4, 5]], PARAMS) == answers


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tree": [[0, 0]]}, TreeError, "has no parent"),
        ({"tree": [[0], [0]]}, TreeError, "more than once"),
        ({"tree": [[0] * 9]}, TreeError, "path"),
        ({"tree": "nowhere.json"}, TreeError, "cannot be read"),
        ({"tree": "[" * 100_000}, TreeError, "too deeply"),
        ({"tree": [[VOCAB_SIZE]]}, ValueError, "rank|candidate"),
        ({"sizes": "huge"}, MedusaConfigError, "'sizes'"),
        ({"draft_vocab_size": 0}, MedusaConfigError, "draft_vocab_size"),
        ({"draft_vocab_size": 100}, MedusaConfigError, "draft_vocab_size is 100"),
        ({"lookup": True, "tree": "static"}, MedusaConfigError, "lookup"),
        ({"acceptance": "lossy"}, MedusaConfigError, "'acceptance'"),
        ({"typical_epsilon": float("nan")}, MedusaConfigError, "typical_epsilon"),
        ({"nodes": 3}, MedusaConfigError, "unknown option 'nodes'"),
        ([], MedusaConfigError, "must be a dict"),
    ],
    ids=str,
)
def test_options_that_cannot_work(
    make_engine: Any, random_heads: Path, living: Any, options: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        make_engine(
            speculative_config={"method": "medusa", "model": str(random_heads)},
            additional_config={"medusa": options},
        )
    engine, answers = living
    assert harness.texts(engine, [[1, 2, 3], [4, 5]], PARAMS) == answers


def test_heads_are_not_looked_for_in_the_hub(make_engine: Any) -> None:
    with pytest.raises(HeadsError, match="no directory of Medusa heads at some-user/some-heads"):
        make_engine(speculative_config={"method": "medusa", "model": "some-user/some-heads"})


def test_a_model_that_is_not_here_while_the_hub_is_off(random_heads: Path, living: Any) -> None:
    with pytest.raises(Exception, match="outgoing traffic has been disabled"):
        start_engine(
            Path("some-user/some-model"),
            speculative_config={"method": "medusa", "model": str(random_heads)},
        )
    engine, answers = living
    assert harness.texts(engine, [[1, 2, 3], [4, 5]], PARAMS) == answers


def test_a_model_directory_without_tokenizer(
    tiny_model: Path, random_heads: Path, living: Any, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*tokenizer*", "special*"))
    assert json.loads((model / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
    with engine_maker(model) as make:
        engine = make(
            skip_tokenizer_init=True,
            speculative_config={"method": "medusa", "model": str(random_heads)},
        )
        params = PARAMS.clone()
        params.detokenize = False
        found = engine.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert tuple(found[0].outputs[0].token_ids) == living[1][0]
