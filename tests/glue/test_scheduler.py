"""What the scheduler subclass does without an engine; with one: tests/engine/test_structured.py."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from vllm import SamplingParams

from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree
from medusa_plugin.vllm_glue.scheduler import (
    DraftTrees,
    MedusaScheduler,
    _allowed_paths,
    _first_rows,
)

TREE = DraftTree.on(TokenTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]]), [5, 6, 7, 8, 9])


def test_the_message_survives_the_way_between_processes() -> None:
    sent = DraftTrees(["a", "b"], [[5, 6, 7, 8, 9], [1]], [TREE, None])
    got = pickle.loads(pickle.dumps(sent))
    assert (got.req_ids, got.draft_token_ids) == (sent.req_ids, sent.draft_token_ids)
    assert got.trees[1] is None
    for name in ("tokens", "parents", "depths", "masks"):
        assert (getattr(got.trees[0], name) == getattr(TREE, name)).all()


def test_a_grant_keeps_what_is_allowed_of_it() -> None:
    drafted = replace(TREE, tokens=np.array([5, 6, 7, -1, 9]))
    assert list(_allowed_paths(drafted)) == [[1, 3], [2, 5]]
    granted = drafted.granted([5, 6, 7])
    assert granted is not None
    assert list(_allowed_paths(granted)) == [[2], [1, 3]]
    assert drafted.granted([5, 6, 8]) is None
    assert drafted.granted([-1] * 5) is None
    nothing = drafted.granted([])
    assert nothing is not None
    assert not list(_allowed_paths(nothing))


class AllowAll:
    """In place of vLLM's grammars."""

    def validate_tokens(self, request: object, spec_tokens: list[int]) -> list[int]:
        return spec_tokens


@pytest.mark.parametrize("state", ["running", "finished", "prefill", "gone"])
@pytest.mark.parametrize("draft", [[5, 6], []], ids=["chain", "nothing"])
def test_a_tree_lives_until_the_next_draft(state: str, draft: list[int]) -> None:
    """Also where the next draft begins with the tree's very tokens."""
    scheduler = MedusaScheduler.__new__(MedusaScheduler)
    scheduler._drafted, scheduler.structured_output_manager = {}, AllowAll()
    request = SimpleNamespace(
        spec_token_ids=[],
        sampling_params=SamplingParams(),
        is_prefill_chunk=False,
        is_finished=lambda: state == "finished",
    )
    scheduler.requests = {"a": request}
    tokens = TREE.tokens.tolist()
    scheduler.update_draft_token_ids(DraftTrees(["a"], [tokens], [TREE]))
    if state == "finished":
        assert (request.spec_token_ids, scheduler._drafted) == ([], {})
        return
    assert request.spec_token_ids == tokens
    scheduler.update_draft_token_ids(DraftTrees([], [], []))  # a step without this request
    assert request.spec_token_ids == tokens
    assert list(scheduler._drafted) == ["a"]
    request.is_prefill_chunk = state == "prefill"
    if state == "gone":
        scheduler.requests = {}
    scheduler.update_draft_token_ids(DraftTrees(["a"], [draft], [None]))
    assert scheduler._drafted == {}
    if state == "running":
        assert request.spec_token_ids == draft


@pytest.mark.parametrize(
    ("num_rows", "total", "first_rows"),
    [
        ([1, 4, 2], 7, [0, 1, 5]),  # vLLM 0.32: used rows only
        ([1, 4, 2], 15, [0, 5, 10]),  # 0.33: 1 + 4 drafts each
        ([5, 5, 5], 15, [0, 5, 10]),  # either
        ([3], 3, [0]),
        ([3], 5, [0]),
    ],
)
def test_where_the_rows_of_a_request_start(
    num_rows: list[int], total: int, first_rows: list[int]
) -> None:
    assert _first_rows(np.zeros((total, 9), np.int32), num_rows) == first_rows
