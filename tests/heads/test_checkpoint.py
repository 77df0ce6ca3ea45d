"""Heads on disk: what the names say decides, and every refusal names the file and the reason."""

from __future__ import annotations

import logging
import os
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_plugin.heads import HeadsError, TargetSpec, load_heads, peek_heads
from medusa_plugin.heads.medusa_checkpoint import MedusaVariant
from tests.heads.conftest import HIDDEN, VOCAB, HeadsWriter, make_target, make_tensors


def refused(path: Path, *parts: str, draft_vocab_size: int | str = "auto") -> None:
    """Loading fails and the message has all `parts`."""
    with pytest.raises(HeadsError) as error:
        load_heads(path, make_target(), draft_vocab_size=draft_vocab_size)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pt"])
@pytest.mark.parametrize("own", [False, True])
def test_headers_tell_the_structure(write_heads: HeadsWriter, pickled: bool, own: bool) -> None:
    path = write_heads(
        make_tensors(3, 2, own=own),
        pickled=pickled,
        config={"medusa_num_heads": 3, "medusa_num_layers": 2},
        calibration={"accuracies": [[0.5, 0.25], [0.25, 0], [0.125, 0]]},
        draft_vocab=[3, 1, 2],
    )
    info = peek_heads(path)
    variant = info.variant
    assert isinstance(variant, MedusaVariant)
    assert (info.num_heads, variant.num_layers, info.hidden_size) == (3, 2, HIDDEN)
    assert info.vocab_size == (VOCAB if own else None)
    assert variant.owns_lm_head is own
    assert variant.has_bias
    assert info.accuracies == ((0.5, 0.25), (0.25, 0.0), (0.125, 0.0))
    assert info.draft_vocab_ranked == 3
    shared = "own lm heads" if own else "shared lm head"
    assert info.describe() == f"3 Medusa heads, 2 layers, {shared}"


def test_the_optional_files_may_be_missing(write_heads: HeadsWriter) -> None:
    info = peek_heads(str(write_heads(make_tensors(1, 1, bias=False))))
    assert (info.variant.has_bias, info.accuracies, info.draft_vocab_ranked) == (False, None, 0)
    assert info.describe() == "1 Medusa head, 1 layer, shared lm head"


@pytest.mark.parametrize("legacy", [False, True])
def test_pt_files_load_the_same_numbers(
    write_heads: HeadsWriter, tmp_path: Path, legacy: bool
) -> None:
    tensors = make_tensors(own=True)
    hidden, token = torch.randn(2, HIDDEN), torch.zeros(2, dtype=torch.int64)
    from_safetensors = load_heads(write_heads(tensors), make_target(), draft_vocab_size="auto")
    expected = from_safetensors.propose(hidden, token, 3)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=not legacy)
    got = load_heads(tmp_path, make_target(), draft_vocab_size="auto").propose(hidden, token, 3)
    assert torch.equal(got.token_ids, expected.token_ids)
    assert torch.equal(got.log_probs, expected.log_probs)


class Payload:
    """Runs a command when unpickled carelessly."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def test_code_in_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({**make_tensors(), "x": Payload(marker)}, file)
    # The payload works: without this the test could pass on a dud.
    torch.load(file, weights_only=False)
    assert marker.exists()
    marker.unlink()
    with pytest.raises(HeadsError, match="carries code"):
        peek_heads(tmp_path)
    refused(tmp_path, str(file), "never run")
    assert not marker.exists()


def test_keys_win_over_the_config_with_a_warning(
    write_heads: HeadsWriter, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_heads(make_tensors(5, 1), config={"medusa_num_heads": 2, "medusa_num_layers": 4})
    with caplog.at_level(logging.WARNING, logger="vllm.medusa"):
        assert peek_heads(path).num_heads == 5
    heads, layers = (record.getMessage() for record in caplog.records)
    assert "medusa_num_heads = 2" in heads and "holds 5" in heads
    assert "medusa_num_layers = 4" in layers and "holds 1" in layers


def test_an_agreeing_config_says_nothing(
    write_heads: HeadsWriter, caplog: pytest.LogCaptureFixture
) -> None:
    peek_heads(write_heads(make_tensors(3, 2), config={"medusa_num_heads": 3}))
    assert not caplog.records


@pytest.mark.parametrize(
    "key",
    [
        "hydra_head.0.0.weight",
        "blocks.0.layers.0.weight",
        "lm_heads.0.weight",
        "0.0.linear.scale",
        "0.0.norm.weight",
        "model.layers.0.self_attn.q_proj.weight",
    ],
)
def test_the_first_unknown_key_is_named(write_heads: HeadsWriter, key: str) -> None:
    tensors = {**make_tensors(), key: torch.zeros(2, 2)}
    path = write_heads(tensors)
    refused(path, f"unknown tensor {key!r}", str(path / "medusa_lm_head.safetensors"))


@pytest.mark.parametrize(
    "key", ["1.0.linear.weight", "2.1.linear.bias", "0.1.linear.weight", "1.2.weight"]
)
def test_a_missing_key_is_named(write_heads: HeadsWriter, key: str) -> None:
    tensors = make_tensors(own=True)
    del tensors[key]
    refused(write_heads(tensors), f"tensor {key} is missing from 3 heads of 2 layers")


def test_a_wild_head_number_is_refused_at_once(write_heads: HeadsWriter) -> None:
    tensors = {**make_tensors(1, 1), "999999999.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}
    refused(write_heads(tensors), "tensor 1.0.linear.weight is missing from 1000000000 heads")


def test_an_lm_head_at_another_layer_does_not_belong(write_heads: HeadsWriter) -> None:
    tensors = {**make_tensors(own=True), "0.5.weight": torch.zeros(VOCAB, HIDDEN)}
    refused(write_heads(tensors), "tensor 0.5.weight does not belong to 3 heads of 2 layers")


def test_the_same_tensor_under_two_names_is_refused(write_heads: HeadsWriter) -> None:
    tensors = {**make_tensors(own=True), "0.00.linear.bias": torch.zeros(HIDDEN)}
    refused(write_heads(tensors), "is there twice", "0.00.linear.bias", "0.0.linear.bias")
    tensors = {**make_tensors(own=True), "0.02.weight": torch.zeros(VOCAB, HIDDEN)}
    refused(write_heads(tensors), "is there twice", "0.02.weight", "0.2.weight")
    tensors = {**make_tensors(), "heads.0.0.linear.bias": torch.zeros(HIDDEN)}
    refused(write_heads(tensors), "unknown tensor 'heads.0.0.linear.bias'")


def test_an_empty_file_is_refused(write_heads: HeadsWriter) -> None:
    refused(write_heads({}), "holds no tensors")


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("0.0.linear.weight", (HIDDEN, 2 * HIDDEN)),
        ("1.1.linear.weight", (HIDDEN + 1, HIDDEN)),
        ("2.0.linear.bias", (HIDDEN, 1)),
        ("1.2.weight", (VOCAB + 1, HIDDEN)),
        ("0.2.weight", (VOCAB,)),
        ("0.0.linear.weight", ()),
        ("0.2.weight", ()),
    ],
)
def test_a_wrong_shape_is_named(write_heads: HeadsWriter, key: str, shape: tuple[int, ...]) -> None:
    tensors = {**make_tensors(own=True), key: torch.zeros(shape)}
    with pytest.raises(HeadsError, match="has shape") as error:
        peek_heads(write_heads(tensors))
    assert "expected" in str(error.value)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_dtype_that_is_not_a_plain_float_is_refused(
    write_heads: HeadsWriter, pickled: bool
) -> None:
    tensors = make_tensors()
    tensors["1.0.linear.weight"] = tensors["1.0.linear.weight"].to(torch.float8_e4m3fn)
    refused(write_heads(tensors, pickled=pickled), "1.0.linear.weight has dtype", "BF16")


def test_heads_for_another_hidden_size_are_refused_with_both_numbers(
    write_heads: HeadsWriter,
) -> None:
    refused(write_heads(make_tensors(hidden=24)), "hidden size 24", f"the target has {HIDDEN}")


def test_heads_for_another_vocabulary_are_refused_with_both_numbers(
    write_heads: HeadsWriter,
) -> None:
    path = write_heads(make_tensors(own=True, vocab=41))
    refused(path, "vocabulary of 41", f"the target has {VOCAB}")
    # Shared heads have no vocabulary of their own.
    peek_heads(write_heads(make_tensors())).require_target(hidden_size=HIDDEN, vocab_size=7)


def test_a_target_head_with_too_few_rows_is_refused(write_heads: HeadsWriter) -> None:
    target = TargetSpec(
        HIDDEN, VOCAB, torch.zeros(VOCAB - 1, HIDDEN), torch.float32, torch.device("cpu")
    )
    with pytest.raises(HeadsError, match=re.escape("[39, 16], expected at least 40 rows of 16")):
        load_heads(write_heads(make_tensors()), target, draft_vocab_size="auto")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["2.1.linear.weight", "1.0.linear.bias", "0.2.weight"])
def test_weights_that_are_not_finite_are_refused(
    write_heads: HeadsWriter, key: str, value: float
) -> None:
    tensors = make_tensors(own=True)
    tensors[key].view(-1)[3] = value
    refused(write_heads(tensors), f"{key} has NaN or infinite values")


def test_weights_that_overflow_the_dtype_are_refused(write_heads: HeadsWriter) -> None:
    tensors = make_tensors()
    tensors["0.0.linear.weight"][0, 0] = 1e5
    path = write_heads(tensors)
    with pytest.raises(HeadsError, match=r"infinite values in torch\.float16"):
        load_heads(path, make_target(torch.float16), draft_vocab_size="auto")


def test_missing_files_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no directory of Medusa heads at", "nowhere")
    refused(tmp_path, str(tmp_path), "medusa_lm_head.safetensors or medusa_lm_head.pt")


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\xff" * 100])
def test_corrupt_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, str(tmp_path / name))


@pytest.mark.parametrize("pickled", [False, True])
def test_a_truncated_file_is_named(write_heads: HeadsWriter, pickled: bool) -> None:
    path = write_heads(make_tensors(), pickled=pickled)
    file = path / ("medusa_lm_head.pt" if pickled else "medusa_lm_head.safetensors")
    file.write_bytes(file.read_bytes()[:-500])
    refused(path, str(file))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_flipped_bytes_in_a_pickle_never_escape_as_another_error(
    tmp_path: Path, legacy: bool
) -> None:
    # Before the catch-all, KeyError, AssertionError, TypeError and IndexError came out of it.
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(make_tensors(), file, _use_new_zipfile_serialization=not legacy)
    original, rng, refusals = file.read_bytes(), random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(original)
        for _ in range(3):
            damaged[rng.randrange(2500)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            load_heads(tmp_path, make_target(), draft_vocab_size="auto")
        except HeadsError as error:
            refusals += 1
            assert str(file) in str(error)
    assert refusals > 20


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, "expected a dict of tensors by name")


@pytest.mark.parametrize("name", ["config.json", "calibration.json"])
def test_unreadable_json_is_named(write_heads: HeadsWriter, name: str) -> None:
    path = write_heads(make_tensors())
    (path / name).write_text("{")
    refused(path, str(path / name), "is not readable JSON")
    (path / name).write_text("[]")
    refused(path, str(path / name), "expected a JSON object, got list")


@pytest.mark.parametrize("table", [None, [], [[]], [[0.5], [1.5], [0]], [["a"], [0], [0]], [0.5]])
def test_a_malformed_calibration_is_refused(write_heads: HeadsWriter, table: object) -> None:
    path = write_heads(make_tensors(), calibration={"accuracies": table})
    refused(path, str(path / "calibration.json"), "one list per head")


def test_a_calibration_of_other_heads_is_refused(write_heads: HeadsWriter) -> None:
    path = write_heads(make_tensors(), calibration={"accuracies": [[0.5]]})
    refused(path, "calibration.json is for 1 heads", "has 3")


def test_a_draft_vocabulary_size_needs_a_ranking(write_heads: HeadsWriter) -> None:
    path = write_heads(make_tensors())
    refused(path, "draft_vocab.safetensors is missing", "'full'", draft_vocab_size=8)


@pytest.mark.parametrize("size", [0, 4])
def test_a_draft_vocabulary_size_out_of_range_is_refused(
    write_heads: HeadsWriter, size: int
) -> None:
    path = write_heads(make_tensors(), draft_vocab=[1, 2, 3])
    refused(path, f"draft_vocab_size is {size}", "ranks 3 token ids", draft_vocab_size=size)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 1], "token ids are repeated"),
        ([1, VOCAB], f"token id {VOCAB} is not in 0..{VOCAB - 1}"),
        ([-1, 3], "token id -1 is not in"),
    ],
)
def test_bad_rankings_are_refused(write_heads: HeadsWriter, ids: list[int], message: str) -> None:
    refused(write_heads(make_tensors(), draft_vocab=ids), "draft_vocab.safetensors", message)


def test_a_ranking_of_another_format_is_refused(write_heads: HeadsWriter) -> None:
    path = write_heads(make_tensors())
    file = path / "draft_vocab.safetensors"
    for tensors in (
        {"ids": torch.zeros(3, dtype=torch.int32)},
        {"token_ids": torch.zeros(3)},
        {"token_ids": torch.zeros(3, 1, dtype=torch.int32)},
    ):
        save_file(tensors, file)
        refused(path, str(file), "int32 vector 'token_ids'")
    file.write_bytes(b"junk")
    refused(path, str(file))
