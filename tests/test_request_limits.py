"""`TreeDrafter` keeps to what requests ask, whatever the sizes that would pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from medusa_plugin.accept import AcceptedPath
from medusa_plugin.batch import StepRequest
from medusa_plugin.draft import TreeDrafter
from medusa_plugin.heads.base import Candidates, ParallelHeads
from medusa_plugin.request_options import RequestOptions
from medusa_plugin.tree.budget import CostCurve, StepCosts
from medusa_plugin.tree.draft_tree import DraftTree
from medusa_plugin.tree.token_tree import TokenTree

# Rows cost nothing, so as many nodes pay as are allowed.
FREE = StepCosts(CostCurve((1, 64), (1.0, 1.0)), CostCurve((1,), (0.25,)))
BUSHY = TokenTree.from_choices(
    [(a,) for a in range(4)] + [(a, b) for a in range(2) for b in (0, 1)]
)


class SureHeads(ParallelHeads):
    """Three heads over 16 tokens, none of them improbable."""

    num_heads = 3
    max_top_k = 16
    calls = 0

    def propose(self, hidden: torch.Tensor, token_ids: torch.Tensor, top_k: int) -> Candidates:
        self.calls += 1
        logits = torch.linspace(2, 0, 16).expand(len(token_ids), self.num_heads, 16)
        best, ids = logits.topk(top_k)
        return Candidates(ids, best, logits)


def request(number: int, options: RequestOptions) -> StepRequest:
    return StepRequest(
        request_id=str(number),
        tree=DraftTree.root_only(),
        first_row=number,
        root_position=0,
        committed=np.array([1, 2, 3], np.int32),
        drafts_next=True,
        options=options,
        typical_temperature=None,
    )


def sizes(drafter: TreeDrafter, *asked: RequestOptions) -> list[int]:
    requests = [request(i, options) for i, options in enumerate(asked)]
    paths = [AcceptedPath((), (4,)) for _ in asked]
    trees = drafter.draft(requests, paths, torch.zeros(len(asked), 8))
    return [tree.num_nodes for tree in trees]


@pytest.mark.parametrize(
    "options",
    [{}, {"costs": FREE}, {"tree": BUSHY}, {"tree": BUSHY, "costs": FREE}, {"lookup": True}],
    ids=["fixed", "auto", "static", "static-auto", "lookup"],
)
def test_limits_beside_each_other(options: dict[str, Any]) -> None:
    drafter = TreeDrafter(SureHeads(), num_nodes=8, **options)
    asked = [
        RequestOptions(),
        RequestOptions(enabled=False),
        RequestOptions(max_nodes=3),
        RequestOptions(max_nodes=60),
        RequestOptions(max_nodes=1),
    ]
    assert sizes(drafter, *asked) == [8, 0, 3, 8, 1]


def test_heads_rest_and_cost_nothing_where_nobody_wants_drafts() -> None:
    heads = SureHeads()
    drafter = TreeDrafter(heads, num_nodes=8, costs=FREE)
    assert sizes(drafter, RequestOptions()) == [8]
    assert heads.calls == 1
    assert sizes(drafter, RequestOptions(enabled=False)) == [0]
    assert heads.calls == 1
    # A step of 1.25 s: with the heads' .25 there would be nothing left that the request adds.
    drafter.observe_step(1, 1, 1, 1.25)
    assert drafter.costs is not None
    assert drafter.costs.per_request == pytest.approx(0.25)
