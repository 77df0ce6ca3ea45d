"""tuning.json: found where it lies, bound to its weights, and named where it is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from medusa_plugin.embedded import embedded_heads_path
from medusa_plugin.heads import HeadsError, peek_heads
from medusa_plugin.heads import tuning as tuning_module
from medusa_plugin.heads.tuning import (
    TUNING_FILE,
    HeadScaling,
    HeadsTuning,
    MeasuredOn,
    cached_tuning_file,
    find_tuning,
    fingerprint,
    write_tuning,
)

NUM_HEADS = 2


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "heads" / "medusa_lm_head.safetensors"
    file.parent.mkdir()
    file.write_bytes(bytes(range(256)) * 100)
    return file


def tuning_of(weights: Path, bias: float = 0.5) -> HeadsTuning:
    return HeadsTuning(
        fingerprint=fingerprint(weights),
        draft_vocab_size=8,
        calibration=(HeadScaling(bias=bias, scale=0.9),) * NUM_HEADS,
        accuracies=((0.5, 0.25), (0.4,)),
        measured_on=MeasuredOn(
            model="m", prompts="p", num_prompts=2, num_tokens=30, dtype="float32", medusa="0"
        ),
    )


def test_it_comes_back_from_beside_the_weights(weights: Path) -> None:
    assert find_tuning(weights, NUM_HEADS) is None
    file = write_tuning(tuning_of(weights), weights, None)
    assert file == weights.parent / TUNING_FILE
    assert find_tuning(weights, NUM_HEADS) == tuning_of(weights)
    assert file.stat().st_mode & 0o777 == 0o644, "others may read the heads"
    assert set(file.parent.iterdir()) == {weights, file}, "nothing is left over"


def test_beside_read_only_heads_it_goes_to_the_cache(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tuning(tuning_of(weights, bias=0.1), weights, None)
    write = tuning_module._write

    def refuse(tuning: HeadsTuning, file: Path) -> Path:
        if file.parent == weights.parent:
            raise HeadsError("read-only")
        return write(tuning, file)

    with monkeypatch.context() as patched:
        patched.setattr(tuning_module, "_write", refuse)
        file = write_tuning(tuning_of(weights, bias=0.2), weights, None)
    assert file == cached_tuning_file(fingerprint(weights))
    newer = find_tuning(weights, NUM_HEADS)
    assert newer is not None and newer.calibration[0].bias == 0.2


@pytest.mark.parametrize("named", [False, True])
def test_an_older_one_in_the_cache_does_not_come_first(weights: Path, named: bool) -> None:
    cached = cached_tuning_file(fingerprint(weights))
    write_tuning(tuning_of(weights, bias=0.2), weights, cached.parent).rename(cached)
    # `medusa tune --out HEADS` means the same place, however it is spelt.
    directory = weights.parent / ".." / weights.parent.name if named else None
    write_tuning(tuning_of(weights, bias=0.3), weights, directory)
    newest = find_tuning(weights, NUM_HEADS)
    assert newest is not None and newest.calibration[0].bias == 0.3


def test_one_written_elsewhere_leaves_the_cache_alone(weights: Path, tmp_path: Path) -> None:
    cached = cached_tuning_file(fingerprint(weights))
    write_tuning(tuning_of(weights, bias=0.2), weights, cached.parent).rename(cached)
    write_tuning(tuning_of(weights, bias=0.3), weights, tmp_path / "out")
    known = find_tuning(weights, NUM_HEADS)
    assert known is not None and known.calibration[0].bias == 0.2


def test_a_directory_that_was_named_is_used_or_refused(weights: Path, tmp_path: Path) -> None:
    assert write_tuning(tuning_of(weights), weights, tmp_path / "out").parent == tmp_path / "out"
    assert find_tuning(weights, NUM_HEADS) is None
    (tmp_path / "file").touch()
    with pytest.raises(HeadsError, match="choose another directory with --out"):
        write_tuning(tuning_of(weights), weights, tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fingerprint": "0" * 32}, "measured on other weights"),
        ({"version": 2}, "version"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"calibration": [{"scale": 1.0}]}, "calibration is for 1 heads, accuracies for 2"),
        ({"calibration": [{"scale": 0.0}] * 2}, "calibration.0.scale"),
        ({"accuracies": [[1.5], [0.1]]}, "accuracies.0.0"),
        ({"accuracies": [[0.5], [-0.1]]}, "accuracies.1.0"),
        ({"accuracies": [[], [0.1]]}, "accuracies.0"),
        ({"calibration": [{}] * 3, "accuracies": [[0.1]] * 3}, "is for 3 heads, but"),
        ({"unknown": 1}, "unknown"),
        (b"{", "is not a tuning of heads"),
        (b"\xff", "cannot be read"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_wrong_file_is_named_with_the_remedy(
    weights: Path, change: dict[str, object] | bytes, named: str, cached: bool
) -> None:
    file = write_tuning(tuning_of(weights), weights, None)
    if cached:
        # The one beside stays as it is: a wrong one that comes first is not passed over.
        file = cached_tuning_file(fingerprint(weights))
        write_tuning(tuning_of(weights), weights, file.parent).rename(file)
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change).encode()
    file.write_bytes(change)
    with pytest.raises(HeadsError, match=named) as caught:
        find_tuning(weights, NUM_HEADS)
    assert str(file) in str(caught.value) and "medusa tune" in str(caught.value)


def test_other_weights_have_another_fingerprint(weights: Path) -> None:
    known = fingerprint(weights)
    data = bytearray(weights.read_bytes())
    data[1000] ^= 1
    weights.write_bytes(data)
    assert fingerprint(weights) != known
    weights.write_bytes(bytes(8 << 20))
    zeros = fingerprint(weights)
    weights.write_bytes(bytes((8 << 20) - 1) + b"\1")
    assert fingerprint(weights) != zeros, "of a large file only blocks are read, the last is one"
    with pytest.raises(HeadsError, match="cannot be read"):
        fingerprint(weights.parent / "missing")


def test_the_embedded_heads_come_tuned(tmp_path: Path) -> None:
    info = peek_heads(embedded_heads_path())
    assert info.tuning is not None and info.accuracies == info.tuning.accuracies
    untuned = peek_heads(embedded_heads_path(), use_tuning=False)
    assert untuned.tuning is None and untuned.accuracies is None
    copy = tmp_path / "heads"
    shutil.copytree(embedded_heads_path(), copy)
    (copy / TUNING_FILE).write_text("{")
    with pytest.raises(HeadsError, match="is not a tuning of heads"):
        peek_heads(copy)
    # Else the remedy, to tune again, would fail by the very file.
    assert peek_heads(copy, use_tuning=False).accuracies == untuned.accuracies
    (copy / TUNING_FILE).unlink()
    assert peek_heads(copy).tuning is None


def test_a_wrong_one_in_the_cache_names_the_weights_by_path(weights: Path) -> None:
    cached = cached_tuning_file(fingerprint(weights))
    tuning = tuning_of(weights).model_copy(update={"fingerprint": "0" * 32})
    write_tuning(tuning, weights, cached.parent).rename(cached)
    with pytest.raises(HeadsError, match="other weights") as caught:
        find_tuning(weights, NUM_HEADS)
    assert "beside" not in str(caught.value) and str(weights) in str(caught.value)


def test_a_broken_link_is_not_passed_over(weights: Path, tmp_path: Path) -> None:
    (weights.parent / TUNING_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(HeadsError, match="cannot be read"):
        find_tuning(weights, NUM_HEADS)


def test_a_failed_write_leaves_nothing_behind(
    weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("medusa_plugin.atomic_file.os.replace", full)
    with pytest.raises(HeadsError, match="No space left"):
        write_tuning(tuning_of(weights), weights, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
