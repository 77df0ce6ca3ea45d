"""The embedded model: made once, checked by hash, safe against interruption."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from medusa_plugin import embedded


@pytest.fixture(scope="module")
def model() -> Path:
    return embedded.ensure_embedded_model(progress=False)


@pytest.fixture
def copied_cache(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own that already holds the model; hard links, so it costs nothing."""
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    target = embedded.embedded_model_path()
    target.parent.mkdir(parents=True)
    shutil.copytree(model, target, copy_function=os.link)
    return target


def test_the_model_answers(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    target = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    output = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
    assert output[0, -1] == tokenizer.eos_token_id  # generation_config stops at the turn's end


def test_second_call_reuses(copied_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_build", lambda *_: pytest.fail("built again"))
    started = time.perf_counter()
    assert embedded.ensure_embedded_model() == copied_cache
    assert time.perf_counter() - started < 30
    assert embedded.is_embedded_model(copied_cache)
    assert not embedded.is_embedded_model(copied_cache.parent)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", embedded.MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damage_is_noticed(copied_cache: Path, name: str, damage: str) -> None:
    assert embedded._is_intact(copied_cache)
    content = (copied_cache / name).read_bytes()
    (copied_cache / name).unlink()
    if damage == "truncated":
        (copied_cache / name).write_bytes(content[: len(content) // 2])
    assert not embedded._is_intact(copied_cache)


def _build_and_die(cache: str) -> None:
    os.environ["MEDUSA_CACHE"] = cache
    embedded._write_weights = lambda *_: os._exit(9)  # killed in the middle of writing
    embedded.ensure_embedded_model(progress=False)


def test_interrupted_write_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    child = multiprocessing.get_context("spawn").Process(
        target=_build_and_die, args=(str(tmp_path),)
    )
    child.start()
    child.join()
    assert child.exitcode == 9
    target = embedded.embedded_model_path()
    assert not target.exists()
    assert list(target.parent.glob(f".{target.name}.*")), "the interruption came too early"
    built = embedded.ensure_embedded_model(progress=False)
    assert embedded._is_intact(built)
    assert not list(target.parent.glob(f".{target.name}.*")), "left-overs stay"


def _ensure(cache: str) -> None:
    os.environ["MEDUSA_CACHE"] = cache
    embedded.ensure_embedded_model(progress=False)


def test_damaged_model_is_rebuilt_by_whoever_is_first(copied_cache: Path) -> None:
    weights = copied_cache / "model.safetensors"
    digest = embedded._sha256(weights)
    weights.unlink()  # not written in place: it is a hard link
    weights.write_bytes(b"damaged")
    context = multiprocessing.get_context("spawn")
    cache = str(copied_cache.parents[1])
    children = [context.Process(target=_ensure, args=(cache,)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert embedded._sha256(weights) == digest
    assert embedded._is_intact(copied_cache)


def test_failed_write_of_the_weights_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors reports a full disk by an error of its own, not by an OSError."""
    import safetensors.torch

    real = safetensors.torch.save_file

    def fail(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        real(tensors, path / "not-there", metadata=metadata)

    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(embedded.EmbeddedModelError, match=r"needs 300 MB.*MEDUSA_CACHE"):
        embedded.ensure_embedded_model(progress=False)
    models = embedded.embedded_model_path().parent
    assert not list(models.glob(f".{embedded.embedded_model_path().name}.*")), "left-overs stay"


def test_changed_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "GGUF_SHA256", "0" * 64)
    with pytest.raises(embedded.EmbeddedModelError, match=f"expected {'0' * 64}.*pip install"):
        embedded.ensure_embedded_model(progress=False)


def test_missing_package_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "llm-not-there")
    with pytest.raises(embedded.EmbeddedModelError, match="pip install"):
        embedded.ensure_embedded_model(progress=False)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("MEDUSA_CACHE", str(blocker))
    with pytest.raises(embedded.EmbeddedModelError, match="MEDUSA_CACHE"):
        embedded.ensure_embedded_model(progress=False)


def test_rotary_rows_are_put_back() -> None:
    """GGUF interleaves the halves that the rotation pairs: row 2i is i, row 2i + 1 is i + half."""
    import numpy as np

    original = np.arange(16.0).reshape(8, 2)  # two heads of four rows
    interleaved = original[[0, 2, 1, 3, 4, 6, 5, 7]]
    np.testing.assert_array_equal(embedded._unpermute(interleaved, 2), original)
