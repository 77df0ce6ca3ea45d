"""Shards: whole or not there, made once, and only those of the texts asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_plugin.training import hidden_states
from medusa_plugin.training.hidden_states import extract, plan
from medusa_plugin.training.target import Target, batches_by_length
from medusa_plugin.training.texts import MIN_HELD_OUT, Text, TrainingError, split
from tests.training import models

SHARD_BYTES = 2 * models.HIDDEN_SIZE * 40
"""Forty rows."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = models.write_llama(tmp_path_factory.mktemp("target"))
    return Target(str(folder), torch.float32, torch.device("cpu"))


def texts_of(count: int, seed: int = 0) -> list[Text]:
    """Texts of two answers each."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for i in range(count):
        ids = torch.randint(models.VOCAB_SIZE, (20 + i,), generator=generator).tolist()
        texts.append(Text(tuple(ids), ((3, 7), (10, len(ids)))))
    return texts


def read(shards: Any) -> tuple[torch.Tensor, list[int], list[int]]:
    parts = [shard.read() for shard in shards]
    tokens = [token for _, part in parts for token in part.tolist()]
    return (
        torch.cat([hidden for hidden, _ in parts]),
        tokens,
        [n for shard in shards for n in shard.lengths.tolist()],
    )


def test_only_rows_from_which_an_answer_token_was_chosen(target: Target, tmp_path: Path) -> None:
    texts = texts_of(7)
    shards = extract(target, texts, tmp_path, shard_bytes=SHARD_BYTES)
    assert len(shards) > 2
    hidden, tokens, lengths = read(shards)
    runs = [(text, *run) for text in texts for run in text.answers]
    assert lengths == [stop - start for _, start, stop in runs]
    assert tokens == [t for text, start, stop in runs for t in text.token_ids[start:stop]]
    # One text at a time, without padding and at its full length.
    wanted = torch.cat([torch.cat(target.hidden_states([text])) for text in texts])
    torch.testing.assert_close(hidden.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_killed_run_makes_only_what_is_missing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of(9)
    whole = read(extract(target, texts, tmp_path / "whole", shard_bytes=SHARD_BYTES))
    folder = tmp_path / "killed"
    made: list[str] = []
    write = hidden_states._write

    def dies(target: Any, part: Any, path: Path, *rest: Any) -> None:
        if len(made) == 2:
            path.with_suffix(".part").write_bytes(b"half")
            raise KeyboardInterrupt
        made.append(path.name)
        write(target, part, path, *rest)

    monkeypatch.setattr(hidden_states, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        extract(target, texts, folder, shard_bytes=SHARD_BYTES)
    (folder / made[0]).write_bytes((folder / made[0]).read_bytes()[:-10])  # a torn one counts not
    again: list[str] = []
    monkeypatch.setattr(
        hidden_states, "_write", lambda *args: (again.append(args[2].name), write(*args))
    )
    done: list[tuple[int, int]] = []
    shards = extract(target, texts, folder, lambda *n: done.append(n), shard_bytes=SHARD_BYTES)
    assert made[1] not in again and made[0] in again
    assert len(again) == len(shards) - 1
    assert done[-1][0] == done[-1][1] == sum(len(text.token_ids) for text in texts)
    assert sorted(file.name for file in folder.iterdir()) == [s.path.name for s in shards]
    for mine, theirs in zip(read(shards), whole, strict=True):
        assert mine == theirs if isinstance(mine, list) else torch.equal(mine, theirs)


def test_more_texts_add_shards_and_other_texts_replace_them(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = texts_of(9)
    extract(target, texts[:6], tmp_path, shard_bytes=SHARD_BYTES)
    before = plan(texts[:6], models.HIDDEN_SIZE, SHARD_BYTES)
    after = plan(texts, models.HIDDEN_SIZE, SHARD_BYTES)
    changed = [i for i, part in enumerate(after) if i >= len(before) or before[i] != part]
    write, again = hidden_states._write, []
    monkeypatch.setattr(
        hidden_states, "_write", lambda *args: (again.append(args[2].name), write(*args))
    )
    more = extract(target, texts, tmp_path, shard_bytes=SHARD_BYTES)
    assert again == [f"{i:05d}.safetensors" for i in changed] and len(again) < len(more)
    others = texts_of(3, seed=5)
    fewer = extract(target, others, tmp_path, shard_bytes=SHARD_BYTES)
    assert len(list(tmp_path.iterdir())) == len(fewer) < len(more)
    assert read(fewer)[1][:4] == list(others[0].token_ids[3:7])


def test_a_full_disk_is_said_before_anything_is_made(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(TrainingError, match="fewer --tokens"):
        extract(target, texts_of(3), tmp_path)
    assert not list(tmp_path.iterdir())


def test_texts_beyond_the_context_are_cut(target: Target, tmp_path: Path) -> None:
    long = Text(tuple(range(40)) * 10, ((5, 10), (20, 300), (350, 400)))
    beyond = Text(long.token_ids, ((350, 400),))
    shards = extract(target, [beyond, long, beyond], tmp_path)
    assert read(shards)[2] == [5, target.max_tokens - 20]
    with pytest.raises(TrainingError, match="beyond the model's context"):
        extract(target, [beyond], tmp_path)


def test_batches_hold_every_text_once_within_their_room() -> None:
    texts = texts_of(50)
    batches = batches_by_length(texts, 128)
    assert sorted(i for batch in batches for i in batch) == list(range(50))
    for batch in batches:
        assert len(batch) * max(len(texts[i].token_ids) for i in batch) <= 128
    assert [len(b) for b in batches_by_length(texts[:2], 4)] == [1, 1]


def test_the_same_prompt_is_never_on_both_sides_and_sides_are_kept() -> None:
    texts = [Text((i % 300, i % 7, 5, i % 11), ((2, 4),)) for i in range(2000)]
    train, held_out = split(texts)
    assert len(train) + len(held_out) == 2000
    assert 20 < len(held_out) < 300
    assert not {t.token_ids[:2] for t in train} & {t.token_ids[:2] for t in held_out}
    more = split([*texts, *(Text((301 + i, 1, 2), ((2, 3),)) for i in range(100))])
    assert more[1][: len(held_out)] == held_out and more[0][: len(train)] == train
    few = split([Text((i, 1, 2), ((2, 3),)) for i in range(MIN_HELD_OUT + 1)])
    assert [len(side) for side in few] == [1, MIN_HELD_OUT]
    with pytest.raises(TrainingError, match="at least 3"):
        split([Text((1, 2), ((1, 2),))] * 50)
