"""Files that lie, that are too deep, or that are not what they seem: each refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from medusa_plugin.heads import HeadsError, load_heads, peek_heads
from tests.heads.conftest import HIDDEN, make_target, make_tensors

SAFETENSORS, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
KEY = "0.0.linear.weight"
NUM_BYTES = 4 * HIDDEN * HIDDEN
Write = Callable[[Path], object]


def refused(directory: Path, file: str, *parts: str) -> None:
    for read in (peek_heads, lambda path: load_heads(path, make_target(), draft_vocab_size="auto")):
        with pytest.raises(HeadsError) as error:
            read(directory)
        message = str(error.value)
        assert str(directory / file) in message
        assert len(message) < 600
        for part in parts:
            assert part in message


@pytest.mark.parametrize("name", ["config.json", "calibration.json"])
@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a": ' + "9" * 10_000 + "}",
        "\0",
        "",
        b"\xff\xfe{}",
    ],
    ids=["deep-list", "deep-object", "long-number", "nul", "empty", "not-utf8"],
)
def test_json_that_cannot_be_read(tmp_path: Path, name: str, content: str | bytes) -> None:
    save_file(make_tensors(), tmp_path / SAFETENSORS)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(tmp_path, name, "is not readable JSON")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, ""])
def test_a_tuning_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    save_file(make_tensors(), tmp_path / SAFETENSORS)
    (tmp_path / "tuning.json").write_text(content)
    with pytest.raises(HeadsError, match=r"tuning\.json is not a tuning of heads"):
        peek_heads(tmp_path)


@pytest.mark.parametrize("value", ['"3"', "null", "true", "NaN", "[3]", "{}", "-1", "1e400"])
def test_a_config_of_wrong_types_does_not_count(
    tmp_path: Path, value: str, warnings: list[str]
) -> None:
    save_file(make_tensors(), tmp_path / SAFETENSORS)
    (tmp_path / "config.json").write_text(f'{{"medusa_num_heads": {value}}}')
    assert peek_heads(tmp_path).num_heads == 3
    assert any("medusa_num_heads" in w and "the weights decide" in w for w in warnings)


@pytest.mark.parametrize(
    "name", ["config.json", "calibration.json", "draft_vocab.safetensors", SAFETENSORS, PICKLE]
)
@pytest.mark.parametrize("kind", ["directory", "broken link"])
def test_what_is_there_but_no_file_is_not_passed_over(tmp_path: Path, name: str, kind: str) -> None:
    if name not in (SAFETENSORS, PICKLE):
        save_file(make_tensors(), tmp_path / SAFETENSORS)
    if kind == "directory":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    refused(tmp_path, name)


@pytest.mark.parametrize(
    "key", ["9" * 5000 + ".0.linear.weight", "0." + "9" * 5000 + ".weight", "٣.0.linear.weight"]
)
@pytest.mark.parametrize("pickled", [False, True])
def test_numbers_in_names_are_short_and_ascii(tmp_path: Path, key: str, pickled: bool) -> None:
    tensors = {**make_tensors(), key: torch.zeros(HIDDEN, HIDDEN)}
    file = PICKLE if pickled else SAFETENSORS
    (torch.save if pickled else save_file)(tensors, tmp_path / file)
    refused(tmp_path, file, "unknown tensor")


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(HIDDEN).to_sparse(), "sparse"),
        (lambda: torch.eye(HIDDEN).to_sparse_csr(), "sparse"),
        (nested, "nested"),
        (lambda: torch.empty(HIDDEN, HIDDEN, device="meta"), "'meta'"),
        (lambda: torch.quantize_per_tensor(torch.eye(HIDDEN), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.eye(HIDDEN, dtype=torch.complex64), "complex64"),
        (lambda: torch.eye(HIDDEN, dtype=torch.float64), "float64"),
        (lambda: torch.eye(HIDDEN, dtype=torch.int8), "int8"),
        (lambda: torch.zeros(1).expand(HIDDEN, HIDDEN), "repeats"),
        (lambda: torch.zeros(1).expand(1 << 20, 1 << 20), "repeats"),
        (lambda: torch.zeros(4).as_strided((HIDDEN, HIDDEN), (0, 0)), "repeats"),
    ],
)
def test_tensors_that_are_no_plain_numbers(
    tmp_path: Path, make: Callable[[], torch.Tensor], reason: str
) -> None:
    torch.save({**make_tensors(), KEY: make()}, tmp_path / PICKLE)
    refused(tmp_path, PICKLE, KEY, reason)


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: tensor.t().contiguous().t(),
        lambda tensor: torch.cat([tensor, tensor])[:HIDDEN],
    ],
    ids=["parameter", "transposed", "slice"],
)
def test_other_ways_to_hold_the_same_numbers_are_fine(
    tmp_path: Path, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensors = make_tensors()
    hidden, token = torch.randn(2, HIDDEN), torch.zeros(2, dtype=torch.int64)
    found = []
    for i, value in enumerate((tensors[KEY], make(tensors[KEY].clone()))):
        directory = tmp_path / str(i)
        directory.mkdir()
        torch.save({**tensors, KEY: value}, directory / PICKLE)
        heads = load_heads(directory, make_target(), draft_vocab_size="auto")
        found.append(heads.propose(hidden, token, 3).logits)
    assert torch.equal(found[0], found[1])


def entry(shape: list[object], start: int = 0, end: int = NUM_BYTES, **other: object) -> object:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end], **other}


SQUARE: list[object] = [HIDDEN, HIDDEN]


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({KEY: entry(SQUARE)}, 10),
        ({KEY: entry(SQUARE)}, NUM_BYTES + 5),
        ({KEY: entry([1 << 40, 1 << 40])}, NUM_BYTES),
        ({KEY: entry([1 << 62, 8], 0, 0)}, 0),
        ({KEY: entry([-1, 8], 0, 32)}, 32),
        ({KEY: entry(["16", 16])}, NUM_BYTES),
        ({KEY: entry(SQUARE, 8, 8 + NUM_BYTES)}, NUM_BYTES + 8),
        ({KEY: entry(SQUARE), "1.0.linear.weight": entry(SQUARE)}, NUM_BYTES),
        ({KEY: entry(SQUARE, 0, 0)}, 0),
        ({KEY: entry(SQUARE, dtype="F64")}, NUM_BYTES),
        ({KEY: entry(SQUARE, dtype="Q4_K")}, NUM_BYTES),
        ({KEY: {"shape": SQUARE, "data_offsets": [0, NUM_BYTES]}}, NUM_BYTES),
        ({KEY: 1}, 0),
        ([], 0),
        (b'{"__metadata__":' + b"[" * 100_000, 0),
        (b"\xff\xfe{}", 0),
        (b"", 0),
    ],
    ids=str,
)
def test_headers_that_lie(tmp_path: Path, header: object, num_bytes: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(num_bytes)
    (tmp_path / SAFETENSORS).write_bytes(content)
    refused(tmp_path, SAFETENSORS)


@pytest.mark.parametrize("length", [1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_longer_than_any_file(tmp_path: Path, length: int) -> None:
    (tmp_path / SAFETENSORS).write_bytes(struct.pack("<Q", length) + b"{}")
    refused(tmp_path, SAFETENSORS, "not a readable safetensors file")


def test_a_scalar_in_place_of_a_ranking(tmp_path: Path) -> None:
    save_file(make_tensors(), tmp_path / SAFETENSORS)
    scalar = torch.zeros((), dtype=torch.int32)
    save_file({"token_ids": scalar}, tmp_path / "draft_vocab.safetensors")
    refused(tmp_path, "draft_vocab.safetensors", "no readable int32 vector")
