"""The same heads in every layout: the same logits; odd files: refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_plugin.heads import HeadsError, holds_heads, load_heads, peek_heads
from medusa_plugin.heads.medusa import MedusaHeads
from tests.heads.conftest import HIDDEN, VOCAB, Tensors, make_target, make_tensors

ROWS = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))


def logits(directory: Path, draft_vocab_size: int | str = "full") -> torch.Tensor:
    heads = load_heads(directory, make_target(), draft_vocab_size=draft_vocab_size)  # type: ignore[arg-type]
    assert isinstance(heads, MedusaHeads)
    return heads.logits(ROWS)


def write(directory: Path, file: str, tensors: Tensors, config: object = None) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({name: t.clone() for name, t in tensors.items()}, directory / file)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def rename(tensors: Tensors, linear: str, lm_head: str) -> Tensors:
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        template = linear if rest[0] == "linear" else lm_head
        renamed[template.format(h=head, l=layer, p=rest[-1])] = tensor
    return renamed


LAYOUTS = {
    "merged": ("medusa_head.{h}.{l}.linear.{p}", "medusa_head.{h}.{l}.weight"),
    "ModelOpt": ("medusa_heads.{h}.{l}.linear.{p}", "medusa_heads.{h}.{l}.weight"),
    "community": ("heads.{h}.{l}.linear.{p}", "heads.{h}.{l}.weight"),
    "vLLM": ("blocks.{h}.layers.{l}.{p}", "lm_heads.{h}.weight"),
    "vLLM-prefix": ("medusa_heads.blocks.{h}.layers.{l}.{p}", "medusa_heads.lm_heads.{h}.weight"),
    "TensorRT-LLM": (
        "medusa_heads.{h}.medusa_layers.{l}.linear.{p}",
        "medusa_heads.{h}.lm_head.weight",
    ),
}
FILES = ("medusa_lm_head.safetensors", "model.safetensors", "rank0.safetensors")


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_logits(
    tmp_path: Path, layout: str, file: str, own: bool
) -> None:
    plain = make_tensors(12, 2, own=own)  # two digits: 10 comes after 9, not after 1
    expected = logits(write(tmp_path / "plain", FILES[0], plain))
    directory = write(tmp_path / "other", file, rename(plain, *LAYOUTS[layout]))
    assert torch.equal(logits(directory), expected)
    info = peek_heads(directory)
    assert info.variant.format.startswith(layout.split("-prefix")[0])
    assert (info.num_heads, info.variant.num_layers) == (12, 2)


def sharded(directory: Path, tensors: Tensors, prefix: str = "medusa_head.") -> Path:
    """Heads over two shards of a target's three; the third is not readable, nor needed."""
    directory.mkdir()
    heads = {prefix + name: tensor for name, tensor in tensors.items()}
    names = list(heads)
    own = {"model.norm.weight": torch.ones(4), "model.count": torch.ones(4, dtype=torch.int8)}
    shards = {
        "a.safetensors": {name: heads[name] for name in names[::2]} | own,
        "b.safetensors": {name: heads[name] for name in names[1::2]},
    }
    weight_map = {"lm_head.weight": "c.safetensors"}
    for file, content in shards.items():
        save_file(content, directory / file)
        weight_map |= dict.fromkeys(content, file)
    (directory / "c.safetensors").write_bytes(b"not to be read")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_heads_inside_a_targets_shards(tmp_path: Path, prefix: str) -> None:
    plain = make_tensors(3, 2, own=True)
    directory = sharded(tmp_path / "merged", plain, prefix)
    assert torch.equal(logits(directory), logits(write(tmp_path / "plain", FILES[0], plain)))
    assert peek_heads(directory).variant.source.others == 2
    assert holds_heads(directory)


def test_a_whole_model_without_heads_holds_none(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", FILES[1], {"model.norm.weight": torch.ones(4)})
    assert not holds_heads(directory)
    with pytest.raises(HeadsError, match=r"unknown tensor 'model\.norm\.weight'"):
        peek_heads(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "weight_map"),
        ({"weight_map": {"medusa_head.0.0.linear.weight": "../x.safetensors"}}, "is no file name"),
        (
            {"weight_map": {"medusa_head.0.0.linear.weight": "z.safetensors"}},
            "is missing",
        ),
        ({"weight_map": {"medusa_head.0.0.linear.weight": 3}}, "weight_map"),
    ],
)
def test_a_bad_index_is_named(tmp_path: Path, change: object, message: str) -> None:
    directory = sharded(tmp_path / "merged", make_tensors())
    (directory / "model.safetensors.index.json").write_text(json.dumps(change))
    with pytest.raises(HeadsError, match=message):
        peek_heads(directory)


def test_a_merged_models_unknown_head_tensor_is_named(tmp_path: Path) -> None:
    tensors = {**make_tensors(), "0.norm.weight": torch.ones(HIDDEN)}
    directory = sharded(tmp_path / "merged", tensors)
    with pytest.raises(HeadsError, match=r"unknown tensor 'medusa_head\.0\.norm\.weight'"):
        peek_heads(directory)


TOKEN_MAP = torch.tensor([7, 3, 0, 39, 12])


def vllm_tensors(own: bool = True) -> Tensors:
    return rename(make_tensors(3, 1, own=own), *LAYOUTS["vLLM"])


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_token_map_is_the_draft_vocabulary(tmp_path: Path, truncated: bool, shared: bool) -> None:
    plain = make_tensors(3, 1, own=True)
    if shared:
        plain |= {f"{h}.1.weight": plain["0.1.weight"] for h in range(3)}
    full = logits(write(tmp_path / "plain", FILES[0], plain))
    tensors = rename(plain, *LAYOUTS["vLLM"])
    if shared:
        del tensors["lm_heads.1.weight"], tensors["lm_heads.2.weight"]
    if truncated:
        tensors = {n: t[TOKEN_MAP] if n.startswith("lm_heads") else t for n, t in tensors.items()}
    tensors["token_map"] = TOKEN_MAP
    directory = write(tmp_path / "vllm", FILES[1], tensors, {"vocab_size": VOCAB})
    for size, columns in (("full", TOKEN_MAP), ("auto", TOKEN_MAP), (2, TOKEN_MAP[:2])):
        torch.testing.assert_close(logits(directory, size), full[..., columns], atol=1e-5, rtol=0)
    heads = load_heads(directory, make_target(), draft_vocab_size="auto")
    assert isinstance(heads, MedusaHeads)
    best = heads.propose(ROWS, torch.zeros(5, dtype=torch.int64), 1).token_ids[:, :, 0]
    assert torch.equal(best, TOKEN_MAP[full[..., TOKEN_MAP].argmax(-1)].T)
    assert peek_heads(directory).draft_vocab_ranked == len(TOKEN_MAP)
    with pytest.raises(HeadsError, match="draft_vocab_size is 6"):
        logits(directory, 6)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_lm_head_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    table = torch.randn(VOCAB, HIDDEN)
    plain = make_tensors(3, 1) | {f"{h}.1.weight": table for h in range(3)}
    directory = write(tmp_path / "vllm", FILES[1], vllm_tensors(own=False) | {name: table})
    expected = logits(write(tmp_path / "plain", FILES[0], plain))
    torch.testing.assert_close(logits(directory), expected, atol=1e-5, rtol=0)


def test_the_logit_scale_counts(tmp_path: Path) -> None:
    unscaled = logits(write(tmp_path / "a", FILES[1], vllm_tensors()))
    scaled = write(tmp_path / "b", FILES[1], vllm_tensors(), {"logit_scale": 0.25})
    assert torch.equal(logits(scaled), unscaled * 0.25)
    for bad in (0, "1", None, [1]):
        write(tmp_path / "c", FILES[1], vllm_tensors(), {"logit_scale": bad})
        with pytest.raises(HeadsError, match="logit_scale"):
            peek_heads(tmp_path / "c")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"medusa_fc_bias": False}, "medusa_fc_bias"),
        ({"num_heads": 5}, "num_heads"),
        ({"hidden_size": 4096}, "hidden_size"),
        ({"medusa_config": {"medusa_num_heads": 7}}, "medusa_num_heads = 7"),
        ({"medusa": {"num_medusa_layers": 7}}, "num_medusa_layers = 7"),
    ],
)
def test_a_config_that_differs_warns(tmp_path: Path, config: object, named: str) -> None:
    info = peek_heads(write(tmp_path / "vllm", FILES[1], vllm_tensors(), config))
    (warning,) = info.variant.warnings
    assert named in warning and "the weights decide" in warning


def in_float8(tensors: Tensors, scale: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith("linear.weight"):
            stored[name] = tensor
            continue
        factor = scale(tensor)
        stored[name] = (tensor / factor.reshape(-1, 1)).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = factor
        stored[name.replace(".weight", ".input_scale")] = torch.ones(())
    return stored


@pytest.mark.parametrize(
    "scale",
    [
        lambda t: t.abs().max() / 448,
        lambda t: t.abs().amax(1) / 448,
        lambda t: t.abs().amax(1, keepdim=True) / 448,
    ],
    ids=["tensor", "rows", "column"],
)
def test_float8_with_scales_is_dequantised(
    tmp_path: Path, scale: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    plain = make_tensors(2, 1, own=True, prefix="medusa_heads.")
    stored = in_float8(plain, scale)
    by_hand = {}
    for name, tensor in plain.items():
        factor = stored.get(f"{name}_scale")
        by_hand[name] = tensor if factor is None else stored[name].float() * factor.reshape(-1, 1)
    got = logits(write(tmp_path / "fp8", FILES[1], stored))
    assert torch.equal(got, logits(write(tmp_path / "plain", FILES[1], by_hand)))
    torch.testing.assert_close(
        got, logits(write(tmp_path / "exact", FILES[1], plain)), atol=0.5, rtol=0.1
    )


def test_float8_without_scales_is_refused_with_the_remedy(tmp_path: Path) -> None:
    stored = in_float8(make_tensors(prefix="medusa_heads."), lambda t: t.abs().max() / 448)
    del stored["medusa_heads.1.0.linear.weight_scale"]
    with pytest.raises(HeadsError, match=r"1\.0\.linear\.weight has dtype F8_E4M3.*BF16"):
        peek_heads(write(tmp_path / "fp8", FILES[1], stored))


def test_ranks_of_a_split_checkpoint_are_refused(tmp_path: Path) -> None:
    tensors = rename(make_tensors(), *LAYOUTS["TensorRT-LLM"])
    write(tmp_path, "rank1.safetensors", tensors)
    with pytest.raises(HeadsError, match="tp_size 1"):
        peek_heads(write(tmp_path, "rank0.safetensors", tensors))
