"""`medusa convert` and `medusa inspect`: there and back again, bit for bit, or a plain refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from medusa_plugin.commands.main import app
from medusa_plugin.heads import HeadsError
from medusa_plugin.heads.convert import TARGETS, plan_conversion
from tests.heads.conftest import HIDDEN, VOCAB, HeadsWriter, make_tensors
from tests.heads.test_formats import in_float8, logits, sharded, vllm_tensors, write

V1 = "medusa_lm_head.safetensors"
RUNNER = CliRunner()


def convert(source: Path, destination: Path, to: str, *, force: bool = False) -> Path:
    plan_conversion(source, destination, to, force=force).write()
    return destination


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pt"])
@pytest.mark.parametrize("to", ["medusa-v1", "vllm", "tensorrt-llm", "mlc"])
def test_there_and_back(
    tmp_path: Path, write_heads: HeadsWriter, to: str, pickled: bool, dtype: torch.dtype
) -> None:
    tensors = {name: t.to(dtype) for name, t in make_tensors(11, 2, own=True).items()}
    source = write_heads(tensors, pickled=pickled, draft_vocab=[3, 1, 2])
    there = convert(source, tmp_path / "there", to)
    assert torch.equal(logits(there), logits(source))
    assert (there / "draft_vocab.safetensors").is_file()
    back = load_file(convert(there, tmp_path / "back", "medusa-v1") / V1)
    assert list(back) and back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype and torch.equal(back[name], tensor)


def test_heads_that_share_the_targets_lm_head(tmp_path: Path, write_heads: HeadsWriter) -> None:
    tensors = make_tensors(3, 2)
    out = convert(write_heads(tensors), tmp_path / "out", "medusa-v2")
    assert json.loads((out / "config.json").read_text())["version"] == "2"
    back = load_file(out / V1)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_configs_agree_with_the_weights(tmp_path: Path, write_heads: HeadsWriter) -> None:
    from medusa_plugin.heads import peek_heads

    source = write_heads(make_tensors(3, 2, own=True))
    for to in ("medusa-v1", "vllm", "tensorrt-llm", "mlc"):
        info = peek_heads(convert(source, tmp_path / to, to))
        assert not info.variant.warnings and info.variant.source.config
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["MedusaModel"] and config["medusa_fc_bias"] is True
    assert config["vocab_size"] == config["truncated_vocab_size"] == VOCAB


def test_vllms_own_extras_survive(tmp_path: Path) -> None:
    tensors = vllm_tensors() | {"token_map": torch.tensor([7, 3, 0])}
    tensors |= {f"lm_heads.{h}.weight": tensors[f"lm_heads.{h}.weight"][:3] for h in range(3)}
    config = {"vocab_size": VOCAB, "logit_scale": 0.5}
    source = write(tmp_path / "in", "model.safetensors", tensors, config)
    out = convert(source, tmp_path / "out", "vllm")
    assert torch.equal(logits(out), logits(source))
    written = json.loads((out / "config.json").read_text())
    assert (written["vocab_size"], written["truncated_vocab_size"]) == (VOCAB, 3)
    assert written["logit_scale"] == 0.5
    back = load_file(out / "model.safetensors")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    with pytest.raises(HeadsError, match=r"cannot express a draft vocabulary .*token_map"):
        convert(source, tmp_path / "v1", "medusa-v1")


def test_missing_biases_become_zeros(tmp_path: Path, write_heads: HeadsWriter) -> None:
    source = write_heads(make_tensors(2, 1, own=True, bias=False))
    conversion = plan_conversion(source, tmp_path / "out", "mlc", force=False)
    assert any("no biases" in note for note in conversion.notes)
    conversion.write()
    biases = [t for n, t in load_file(tmp_path / "out/model.safetensors").items() if "bias" in n]
    assert len(biases) == 2 and not any(map(torch.any, biases))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), atol=1e-5, rtol=0)
    assert not any("bias" in name for name in load_file(
        convert(source, tmp_path / "vllm", "vllm") / "model.safetensors"))  # fmt: skip


def test_out_of_a_targets_shards_and_out_of_float8(tmp_path: Path) -> None:
    plain = make_tensors(3, 2, own=True)
    out = convert(sharded(tmp_path / "merged", plain), tmp_path / "out", "medusa-v1")
    back = load_file(out / V1)
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[name], plain[name]) for name in plain)
    stored = in_float8(
        make_tensors(own=True, prefix="medusa_heads."), lambda t: t.abs().max() / 448
    )
    source = write(tmp_path / "fp8", "model.safetensors", stored)
    conversion = plan_conversion(source, tmp_path / "bf16", "medusa-v1", force=False)
    assert any("dequantised" in note for note in conversion.notes)
    conversion.write()
    torch.testing.assert_close(logits(tmp_path / "bf16"), logits(source), atol=0.3, rtol=0.02)


@pytest.mark.parametrize("to", list(TARGETS))
def test_what_a_format_cannot_express_is_named(
    tmp_path: Path, write_heads: HeadsWriter, to: str
) -> None:
    from tests.heads.test_sequential_kinds import hydra

    sequential = write(tmp_path / "hydra", "hydra_lm_head.safetensors", hydra(2, 1))
    with pytest.raises(HeadsError, match=f"hydra heads cannot be written as {to}"):
        convert(sequential, tmp_path / "out", to)
    own = TARGETS[to].own_lm_head
    source = write_heads(make_tensors(own=own is False))
    with pytest.raises(HeadsError, match=f"{to} cannot express heads"):
        convert(source, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path, write_heads: HeadsWriter) -> None:
    source = write_heads(make_tensors(own=True))
    out = convert(source, tmp_path / "out", "mlc")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(HeadsError, match=r"model\.safetensors is there already.*--force"):
        convert(source, out, "mlc")
    (out / "model.safetensors").write_bytes(b"")
    convert(source, out, "mlc", force=True)
    assert (out / "model.safetensors").read_bytes() == before
    with pytest.raises(HeadsError, match="would be mixed up"):
        convert(source, out, "medusa-v1", force=True)
    with pytest.raises(HeadsError, match="name another directory"):
        convert(source, source, "medusa-v1", force=True)
    with pytest.raises(HeadsError, match="is a file"):
        convert(source, out / "config.json", "mlc")


def test_the_commands(tmp_path: Path, write_heads: HeadsWriter) -> None:
    source = write_heads(make_tensors(3, 2, own=True), config={"medusa_num_heads": 9})
    done = RUNNER.invoke(app, ["convert", str(source), str(tmp_path / "out"), "--to", "vllm"])
    assert done.exit_code == 0, done.output
    assert "3 Medusa heads" in done.output
    again = RUNNER.invoke(app, ["convert", str(source), str(tmp_path / "out"), "--to", "vllm"])
    assert again.exit_code == 1 and "--force" in again.output
    report = json.loads(RUNNER.invoke(app, ["inspect", str(source), "--json"]).output)
    parameters = 3 * (2 * (HIDDEN * HIDDEN + HIDDEN) + VOCAB * HIDDEN)
    assert report["num_parameters"] == parameters and report["num_bytes"] == 4 * parameters
    expected: dict[str, Any] = {
        "format": "FasterDecoding",
        "kind": "medusa",
        "num_heads": 3,
        "num_layers": 2,
        "has_bias": True,
        "vocab_size": VOCAB,
        "lm_head": "one per head",
        "dtypes": ["F32"],
    }
    assert {key: report[key] for key in expected} == expected
    assert "medusa_num_heads = 9" in report["warnings"][0]
    text = RUNNER.invoke(app, ["inspect", str(source)]).output
    assert "3 Medusa heads, 2 layers" in text and "Warning" in text
    missing = RUNNER.invoke(app, ["inspect", str(tmp_path / "nowhere")])
    assert missing.exit_code == 1 and "no directory of Medusa heads" in missing.output
    for command in ("inspect", "convert"):
        assert f"medusa {command}" in RUNNER.invoke(app, [command, "--help"]).output


def test_they_do_without_vllm(tmp_path: Path, write_heads: HeadsWriter) -> None:
    source = write_heads(make_tensors())
    code = (
        "import sys; sys.modules['vllm'] = None; from medusa_plugin.commands.main import app; "
        "app(sys.argv[1:], standalone_mode=False)"
    )
    conversion = ["convert", str(source), str(tmp_path / "out"), "--to", "medusa-v2"]
    for command in (["inspect", str(source)], conversion):
        subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True)


def test_hub_ids_come_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_heads: HeadsWriter
) -> None:
    """A hub that is out of reach, and a cache that holds one repository."""
    from huggingface_hub import errors

    source = write_heads(make_tensors(), config={})
    save_file({"token_ids": torch.arange(3, dtype=torch.int32)}, source / "draft_vocab.safetensors")
    asked: list[tuple[str, str | None, bool]] = []

    def download(repo: str, name: str, *, revision: str | None, local_files_only: bool) -> str:
        asked.append((name, revision, local_files_only))
        file = source / name
        if repo != "someone/heads" or not file.is_file():
            raise errors.LocalEntryNotFoundError(name)
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert torch.equal(logits("someone/heads@refs/pr/1"), logits(source))  # type: ignore[arg-type]
    assert {revision for _, revision, _ in asked} == {"refs/pr/1"}
    assert "draft_vocab.safetensors" in {name for name, _, _ in asked}
    asked.clear()
    with pytest.raises(HeadsError, match=r"nobody/heads.*in the cache.*cannot be reached"):
        plan_conversion("nobody/heads", tmp_path / "out", "mlc", force=False)
    assert [offline for _, _, offline in asked][:2] == [False, True], "the network is tried once"
