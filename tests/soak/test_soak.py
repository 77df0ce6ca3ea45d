"""A short slice of the fuzzer, and that it finds what it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.soak import report as reports
from tests.soak import rounds
from tests.soak import shrink as shrinking
from tests.soak.cases import Case
from tests.soak.compare import Difference, Scored, broken_rules, differences
from tests.soak.drafts import identify
from tests.soak.engines import Completion, Laboratory, Outcome, laboratory
from tests.soak.faults import FAULTS
from tests.soak.report import Report
from tests.soak.rounds import Finding, Plan, RoundResult, run_round
from tests.soak.ties import logit_gap, nearest_gap

# Their requests have all parameters, accept drafts, are preempted and aborted, and end in all ways.
SEEDS = {"chunked": 0, "preempting": 4}


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with laboratory() as made:
        yield made


@pytest.mark.parametrize("configuration", SEEDS)
def test_random_requests_equal_plain(lab: Laboratory, configuration: str) -> None:
    result = run_round(lab, SEEDS[configuration], configuration, count=60)
    assert result.is_clean, (result.mismatches, result.leftovers)
    assert not result.findings, "a tie: rounding differs here, choose another seed"
    assert result.compared > 40
    assert result.counts["accepted tokens"] > 50
    assert result.counts["branching trees"] > 50
    assert result.counts["preemptions"] > 0


@pytest.mark.parametrize(
    "fault",
    ["compaction-forgets-a-layer", "stops-are-seen-at-the-end-of-a-step-only"],
)
def test_planted_faults_are_found(lab: Laboratory, fault: str) -> None:
    with FAULTS[fault]():
        assert run_round(lab, 4, "preempting", count=30).mismatches
    assert not lab.medusa("preempting").leftovers()["leaked_blocks"]


def test_gap_is_that_of_the_logits(lab: Laboratory) -> None:
    case = Case("gap", (5, 6, 7), {"temperature": 0.0, "max_tokens": 4, "logprobs": 3}, 0)
    answer = lab.plain.serve([case], [case.sampling_params()])["gap"].completions[0]
    for position, entry in enumerate(answer.logprobs):
        best, second, third = sorted(entry, key=lambda token: -entry[token].logprob)[:3]
        known = answer.token_ids[: position + 1]
        assert best == known[-1]
        gap = entry[best].logprob - entry[second].logprob
        assert logit_gap(lab.plain, case, 0, known, second) == pytest.approx(gap, rel=0.05)
        assert logit_gap(lab.plain, case, 0, known, best) == 0
        assert logit_gap(lab.plain, case, 0, known, third) > gap
        assert nearest_gap(lab.plain, case, 0, known, best) == pytest.approx(gap, rel=0.01)
    seeded = Case("gap", (5, 6, 7), {"temperature": 1.0, "seed": 3, "max_tokens": 4, "top_k": 2}, 0)
    answer = lab.plain.serve([seeded], [seeded.sampling_params()])["gap"].completions[0]
    assert logit_gap(lab.plain, seeded, 0, answer.token_ids, answer.token_ids[-1]) == 0
    assert (
        logit_gap(lab.plain, seeded, 0, answer.token_ids, (answer.token_ids[-1] + 1) % 288) > 0.01
    )


def test_a_round_is_shrunk_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    def needed(_: Any, plan: Plan) -> bool:
        asked = {case.name: case for case in plan.cases}
        return {"r3", "r17"} <= set(asked) and "top_k" in asked["r3"].params

    monkeypatch.setattr(shrinking, "_shows", needed)
    monkeypatch.setattr(shrinking, "answered", lambda _, plan: plan)
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 3, "top_k": 4, "logprobs": 2}
    cases = [Case(f"r{i}", (1,), dict(params), i, abort_after=2, priority=1) for i in range(20)]
    made = SimpleNamespace(plain=None)
    plan = shrinking.shrink(made, Plan(0, "roomy", cases, 0.1, "raw_logprobs"), Console(quiet=True))
    first, last = plan.cases
    assert first.params == {"temperature": 1.0, "seed": 1, "max_tokens": 3, "top_k": 4}
    assert last.params == {"temperature": 1.0, "seed": 1, "max_tokens": 3}
    assert (last.arrival, last.abort_after, last.priority, plan.reset_probability) == (
        0,
        None,
        0,
        0,
    )


# Comparing


class Entry:
    """Like vLLM's `Logprob`."""

    def __init__(self, logprob: float, rank: int = 1, decoded_token: str = "a") -> None:
        self.logprob, self.rank, self.decoded_token = logprob, rank, decoded_token


def outcome(**changes: Any) -> Outcome:
    fields = {
        "token_ids": [1, 2, 3],
        "text": "abc",
        "logprobs": [{7: Entry(-0.5), 8: Entry(-1.5, 2)}] * 3,
        "finish_reason": "length",
        "stop_reason": None,
    }
    return Outcome({0: Completion(**{**fields, **changes})}, finished=True)


def test_equal_answers_do_not_differ() -> None:
    close = [{7: Entry(-0.50005), 8: Entry(-1.5, 2)}] * 3
    forbidden = [{7: Entry(-0.5), 8: Entry(-1.5, 2), 9: Entry(float("-inf"), 3)}] * 3
    for same in (outcome(), outcome(logprobs=close), outcome(logprobs=forbidden)):
        assert differences(same, outcome()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2, 3, 4]},
        {"token_ids": [1, 5, 3]},
        {"text": "abd"},
        {"finish_reason": "stop"},
        {"stop_reason": "c"},
        {"logprobs": None},
        {"logprobs": [{7: Entry(-0.5), 8: Entry(-1.5, 2)}] * 2},
        {"logprobs": [{7: Entry(-0.5002), 8: Entry(-1.5, 2)}] * 3},
        {"logprobs": [{7: Entry(-0.5), 8: Entry(-1.5, 4)}] * 3},
        {"logprobs": [{7: Entry(-0.5), 9: Entry(-1.6, 2)}] * 3},
        {"logprobs": [{8: Entry(-1.5, 2), 7: Entry(-0.5)}] * 3},
        {"logprobs": [{7: Entry(-0.5), 8: Entry(-1.5, 2, "b")}] * 3},
    ],
)
def test_differences_are_seen(changes: dict[str, Any]) -> None:
    found = differences(outcome(**changes), outcome())
    assert found and not any(difference.is_rounding for difference in found)


def test_only_processed_logits_carry_more_than_the_models_rounding() -> None:
    params = {"temperature": 0.25, "seed": 1, "max_tokens": 3, "repetition_penalty": 0.8}
    case = Case("r0", (1,), params, 0)
    assert case.amplification("raw_logprobs") == case.amplification("raw_logits") == 1
    assert case.amplification("processed_logprobs") == 5
    assert Case("r0", (1,), {"temperature": 1.5}, 0).amplification("processed_logits") == 1
    assert Case("r0", (1,), {"temperature": 0.0}, 0).amplification("processed_logits") == 1


def test_an_aborted_request_may_end_early_but_not_differ() -> None:
    def cut(**changes: Any) -> Outcome:
        made = outcome(finish_reason=None, logprobs=None, **changes)
        made.aborted = True
        return made

    assert differences(cut(token_ids=[1, 2], text="ab"), outcome()) == []
    assert differences(cut(token_ids=[1, 3], text="ab"), outcome())
    assert differences(cut(token_ids=[1, 2], text="ac"), outcome())


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({"max_tokens": 2}, {}),
        ({"max_tokens": 4}, {}),
        ({"stop_token_ids": [2]}, {}),
        ({"min_tokens": 3, "max_tokens": 9}, {"token_ids": [1], "finish_reason": "stop"}),
        ({"allowed_token_ids": [1, 2]}, {}),
        ({"logit_bias": {2: -100.0}}, {}),
        ({"logprobs": 1}, {"logprobs": None}),
        ({"n": 2}, {}),
        ({}, {"finish_reason": None}),
    ],
)
def test_unseeded_answers_keep_the_rules(asked: dict[str, Any], changes: dict[str, Any]) -> None:
    good = Case("r0", (1, 2), {"temperature": 1.0, "max_tokens": 3}, 0)
    assert broken_rules(good, outcome(logprobs=None)) == []
    case = Case("r0", (1, 2), {"temperature": 1.0, "max_tokens": 3, **asked}, 0)
    assert broken_rules(case, outcome(**{"logprobs": None, **changes}))


def test_requests_are_found_by_vllms_ids() -> None:
    assert identify("r12-0af3b1c2") == ("r12", 0)
    assert identify("3_r12-0af3b1c2") == ("r12", 3)


# Reporting


def result(seed: int = 0, tie: bool | None = None, leaked: int = 0) -> RoundResult:
    made = RoundResult(seed, "roomy", compared=100)
    if tie is not None:
        made.findings.append(Finding(seed, "roomy", "r1", "token 1, not 2", tie, 1e-6, {}))
    made.leftovers = {"leaked_blocks": leaked, "plain: leaked_blocks": 0, "_proposed": 0}
    return made


def test_report_adds_up_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"git_sha": "abc", "git_dirty": False}
    monkeypatch.setattr(reports, "circumstances", lambda: dict(source))
    path = tmp_path / "build" / "soak.json"
    first = Report(path, resume=False)
    first.add(result(4))
    assert first.faults == []
    second = Report(path, resume=True)
    assert second.next_seed == 5
    second.add(result(5, tie=True))
    assert second.faults == []
    second.add(result(6, tie=False))
    second.add(result(7, leaked=2))
    assert second.faults == ["1 mismatches", "2 leaked blocks"]
    written = json.loads(path.read_text())
    assert (written["compared"], written["ties"], written["seeds"]) == (400, 1, [4, 5, 6, 7])
    assert written["findings"][0]["seed"] == 6 and written["tie_gaps"][0]["gap"] == 1e-6
    source["git_sha"] = "def"
    with pytest.raises(ValueError, match="results of two sources do not add up"):
        Report(path, resume=True)


def test_prompt_logprobs_that_come_in_pieces_add_up() -> None:
    pieces = [[None, {1: "a"}], [{2: "b"}], []]
    outcomes = {is_delta: Outcome() for is_delta in (True, False)}
    for is_delta, outcome in outcomes.items():
        for piece in pieces:
            outcome.add(
                SimpleNamespace(prompt_logprobs=piece, outputs=[], finished=False), is_delta
            )
    assert outcomes[True].prompt_logprobs == [None, {1: "a"}, {2: "b"}]
    assert outcomes[False].prompt_logprobs == []


def test_only_scores_that_float32_explains_are_ties(lab: Laboratory) -> None:
    """Two engines may each be off by what transformers' float32 model is."""
    text = [7 * i % 250 for i in range(150)]
    error = lab.exact.rounding(text)
    assert 1e-6 < error < 5e-4
    case = Case("r", tuple(text[:100]), {"temperature": 0.0}, 0)
    plan = Plan(0, "roomy", [case], 0.0, "raw_logits")
    plan.expected["r"] = Outcome({0: Completion(token_ids=text[100:])})
    for factor, tied in ((1.9, True), (2.1, False)):
        difference = Difference("a score", scored=Scored(False, 50, factor * error))
        assert rounds._is_rounding(lab, plan, case, difference) is tied
    assert not rounds._is_rounding(lab, plan, case, Difference("a token"))
