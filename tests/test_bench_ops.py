"""What bench_ops.py concludes from its records, on records made up here."""

from __future__ import annotations

import math

import pytest
from ops.report import SECTION, markdown
from ops.results import ParityError, check_parity, summarise
from ops.shapes import attention_shapes, compaction_shapes, every
from ops.timing import Repeats, compare, time_pair
from record.markdown import markers, replace_section


def attention_record(isa="vec", dtype="bfloat16", threads=1, context=128, **ratios):
    rivals = {name: {"ratio": ratio} for name, ratio in ratios.items()}
    for name in ("vllm", "sdpa", "sdpa_gather", "tvm"):
        rivals.setdefault(name, {"theirs_us": None, "reason": "not here"})
    return {
        "isa": isa,
        "dtype": dtype,
        "head_dim": 64,
        "threads": threads,
        "context": context,
        "fraction_of_limit": 0.5,
        "rivals": rivals,
    }


def compaction_record(same, rows, batch=1, fraction_of_step=None):
    return {
        "layers": 30,
        "kv_heads": 3,
        "head_dim": 64,
        "layout": "vec",
        "dtype": "bfloat16",
        "batch": batch,
        "threads": 1,
        "ours_us": 10.0,
        "gbps": 1.0,
        "fraction_of_step": fraction_of_step,
        "rivals": {"same_pieces": {"ratio": same}, "row_pieces": {"ratio": rows}},
    }


ATTENTION = [
    attention_record(vllm=0.8, sdpa=0.5, sdpa_gather=0.2),
    attention_record(vllm=1.2, sdpa=0.25, sdpa_gather=0.4, threads=2),
    attention_record(dtype="float32", vllm=2.0, sdpa=0.8, sdpa_gather=0.1, tvm=0.1, context=512),
]
COMPACTION = [compaction_record(2.0, 4.0, 1, 0.01), compaction_record(0.8, 5.0, 64, 0.3)]


def test_summary_takes_the_worst_over_all_and_per_dtype():
    summary = summarise(ATTENTION, COMPACTION, "no amx_bf16", 19.0)
    assert summary["worst_ratio_vs_vllm_vec"] == 2.0
    assert summary["median_ratio_vs_vllm_vec"] == 1.2
    assert summary["worst_ratio_vs_vllm_vec_bfloat16"] == 1.2
    assert summary["median_ratio_vs_vllm_vec_bfloat16"] == 1.0
    assert summary["median_ratio_vs_vllm_vec_float32"] == 2.0
    # Speed-ups are inverse, so the least one comes from the largest ratio.
    assert summary["min_speedup_vs_sdpa"] == 1.25
    assert summary["min_speedup_vs_sdpa_gather_timed"] == 2.5
    assert summary["min_speedup_vs_tvm_tree_attn_cpu"] == 10.0


def test_summary_of_compaction_is_the_slowest_against_memcpy():
    summary = summarise([], COMPACTION, None, 19.0)
    assert summary["compaction_fraction_of_memcpy"] == 0.5
    assert summary["compaction_fraction_of_memcpy_row_pieces"] == 0.2
    assert summary["compaction_share_of_step_batch_1"] == 0.01
    assert summary["compaction_share_of_step_worst"] == 0.3


def test_amx_is_null_with_a_reason_and_never_mixed_with_vec():
    summary = summarise(ATTENTION, [], "this processor has no amx_bf16", 19.0)
    assert summary["worst_ratio_vs_vllm_amx"] is None
    assert summary["worst_ratio_vs_vllm_amx_reason"] == "this processor has no amx_bf16"
    summary = summarise([*ATTENTION, attention_record(isa="amx", vllm=3.0)], [], None, 19.0)
    assert summary["worst_ratio_vs_vllm_amx"] == 3.0
    assert summary["worst_ratio_vs_vllm_amx_reason"] is None
    assert summary["worst_ratio_vs_vllm_vec"] == 2.0


def test_nothing_measured_is_null_not_an_error():
    summary = summarise([], [], None, 19.0)
    reason = summary.pop("worst_ratio_vs_vllm_amx_reason")
    assert reason and summary.pop("step_ms") == 19.0
    assert set(summary.values()) == {None}


@pytest.mark.parametrize(
    "error, apart, culprit",
    [
        (1.1, {}, "tree_attention is off"),
        (math.nan, {}, "tree_attention is off"),
        (0.5, {"vllm": 10.1}, "vllm is"),
        (0.5, {"vllm": 1.0, "sdpa": math.nan}, "sdpa is"),
    ],
)
def test_wrong_results_are_refused(error, apart, culprit):
    with pytest.raises(ParityError, match=culprit):
        check_parity("a shape", error, 1.0, apart)


def test_right_results_pass():
    check_parity("a shape", 1.0, 1.0, {"vllm": 10.0, "sdpa": 0.0})


def test_a_pair_is_compared_by_medians():
    record = compare([1e-3, 2e-3, 9e-3], [4e-3, 4e-3, 5e-3])
    assert (record["ours_us"], record["theirs_us"], record["ratio"]) == (2000, 4000, 0.5)
    assert record["ratio_quartiles"] == [0.375, 1.15]
    assert compare([1e-3], [2e-3])["ratio"] == 0.5


def test_a_pair_runs_equally_often_and_each_goes_first():
    calls: list[str] = []
    repeats = Repeats(seconds=0, least=4)
    own, other = time_pair(lambda: calls.append("a"), lambda: calls.append("b"), repeats)
    assert len(own) == len(other) == 4
    assert "".join(calls[-8:]) == "abbaabba"
    assert repeats.rounds(1.0) == 4 and Repeats(1.0, 4, 50).rounds(1e-9) == 50


def test_a_quick_run_leaves_no_value_out():
    for count, shapes in ((8, attention_shapes()), (4, compaction_shapes())):
        picked = every(count, shapes)
        assert len(picked) == -(-len(shapes) // count)
        for name in vars(shapes[0]):
            if name != "kv_heads":  # follows from the others
                assert {getattr(s, name) for s in picked} == {getattr(s, name) for s in shapes}


def test_markdown_goes_between_the_markers():
    results = {
        "command": "python benchmarks/bench_ops.py",
        "git_sha": "0123456789abcdef",
        "git_dirty": True,
        "time": "now",
        "quick": False,
        "threads": [1, 2],
        "notes": [],
        "versions": {"torch": "2"},
        "cpu": {"model": "a CPU", "flags": {"fma": True, "amx_bf16": False}},
        "summary": summarise(ATTENTION, COMPACTION, "no amx_bf16", 19.0),
        "limits": [
            {
                "threads": 1,
                "fma_fp32_gflops": 100.0,
                "read": {"dram": {"gbps": 20.0}},
                "memcpy_gbps": 10.0,
            }
        ],
        "attention": ATTENTION,
        "compaction": COMPACTION,
    }
    text = markdown(results)
    assert "0123456789ab with uncommitted changes" in text
    assert "| `worst_ratio_vs_vllm_amx` | none: no amx_bf16 |" in text
    assert "| vec | bfloat16 | 64 | 2 | 1.20 (1.20) | - | 0.50 (0.50) |" in text
    begin, end = markers(SECTION)
    document = f"before\n{begin}\nold\n{end}\nafter\n"
    once = replace_section(document, SECTION, text)
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "old" not in once
    assert replace_section(once, SECTION, text) == once
    with pytest.raises(ValueError, match="once each"):
        replace_section("no markers", SECTION, text)
