"""What bench_decode.py concludes from its runs, and whom it lets take part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from decode import engines, results
from decode.results import Run, StageTimes, cells, stage_times, summarise

from medusa_plugin.vllm_glue.offline_engine import BatchCompletion

HEADS = Path(engines.__file__).parents[2] / "medusa_plugin/assets/smollm2-135m-medusa"
SETUP = engines.Setup(Path("model"), HEADS, False, "bfloat16", 2, max_num_seqs=8)


def run(engine="ours", batch=1, seconds=1.0, repetition=0, temperature=0.0, steps=50, tokens=100):
    return Run(
        batch, temperature, engine, repetition, tokens, seconds, tokens, steps, 200, tokens - steps
    )


def test_a_run_counts_decode_tokens_without_those_of_the_prefill():
    answer = BatchCompletion(((1, 2, 3), (4, 5, 6)), ("", ""), (2, 3), 4.0, 3, 7, 1)
    one = Run.of(2, 0.0, "ours", 0, [answer, answer])
    assert (one.tokens, one.seconds, one.rate) == (12, 8.0, 1.5)
    assert (one.decode_tokens, one.decode_steps) == (8, 6)
    assert (one.drafted, one.accepted) == (14, 2)


RUNS = [
    run("plain", seconds=2.0),
    run("ours", seconds=1.0),
    run("ngram", seconds=0.5),
    run("plain", seconds=4.0, repetition=1),  # a slow moment: it hits all of the repetition
    run("ours", seconds=1.6, repetition=1),
    run("ngram", seconds=1.0, repetition=1),
    run("plain", seconds=2.0, repetition=2),
    run("ours", seconds=1.25, repetition=2),
    run("ngram", seconds=0.5, repetition=2),
    run("plain", batch=4, seconds=1.0),
    run("ours", batch=4, seconds=2.0),
    run("plain", seconds=1.0, temperature=0.8),
    run("ours", seconds=0.8, temperature=0.8),
]


def test_ratios_are_taken_within_a_repetition():
    ours = next(c for c in cells(RUNS) if c["engine"] == "ours")
    assert ours["of_plain"] == {"median": 2.0, "min": 1.6, "max": 2.5}
    assert ours["tokens_per_second"] == {"median": 80.0, "min": 62.5, "max": 100.0}
    assert ours["tokens_per_step"] == 2.0 and ours["drafts_accepted"] == 0.25


def test_summary_is_ours_greedy_and_says_why_a_rival_is_missing():
    stages = [StageTimes(1, "ours", 9, {}, 0.2), StageTimes(1, "plain", 9, {}, 0.1)]
    summary = summarise(RUNS, stages, {"suffix": "not installed"})
    assert summary["speedup_by_batch"] == {"1": 2.0, "4": 0.5}
    assert summary["speedup_by_batch_sampled"] == {"0.8": {"1": 1.25}}
    assert summary["tokens_per_step"] == 2.0
    assert summary["vs_ngram"] == 0.5 and summary["vs_ngram_by_batch"] == {"1": 0.5}
    assert summary["vs_suffix"] is None and summary["vs_suffix_reason"] == "not installed"
    assert summary["vs_chain_medusa"] is None
    assert summary["vs_chain_medusa_reason"] == "not asked for with --engines"
    assert "vs_ngram_reason" not in summary
    assert (summary["overhead_fraction"], summary["overhead_fraction_plain"]) == (0.2, 0.1)
    assert summary["speedup_by_engine"]["ngram"] == {"1": 4.0}


def test_nothing_measured_is_null_not_an_error():
    summary = summarise([], [], {})
    assert summary["speedup_by_batch"] == {} and summary["overhead_fraction"] is None


def test_stages_add_up_and_the_slowest_steps_do_not_count():
    steps = [{"step": 4.0, "target forward": 2.0, "lm_head": 1.0, "accept": 0.5}] * 9
    times = stage_times(1, "ours", [*steps, {"step": 100.0, "compact": 90.0}])
    assert times.steps == 9 and times.overhead_fraction == 0.25
    assert times.milliseconds == {
        "target forward": 2000.0,
        "lm_head": 1000.0,
        "accept": 500.0,
        "rest": 500.0,
    }
    assert stage_times(1, "ours", [{"step": 1.0}]).overhead_fraction == 1.0


# Who takes part


def test_our_plugin_is_off_in_every_engine_but_ours(tmp_path):
    takers, _ = engines.contenders([engines.NGRAM, engines.OURS], [], SETUP, tmp_path)
    disabled = {t.name: t.settings(SETUP).environment["MEDUSA_DISABLE"] for t in takers}
    assert disabled == {"plain": "1", "ngram": "1", "ours": "0"}
    shared = [t.settings(SETUP).options for t in takers]
    for options in shared:
        options.pop("speculative_config", None)
    assert shared[0] == shared[1] == shared[2]


def test_every_engine_computes_on_the_threads_asked_for(tmp_path):
    takers, _ = engines.contenders([engines.NGRAM, engines.OURS], [], SETUP, tmp_path)
    for made in takers:
        environment = made.settings(replace(SETUP, threads=3)).environment
        # torch takes what numba sets, and numba starts from a variable of its own.
        assert environment["OMP_NUM_THREADS"] == environment["NUMBA_NUM_THREADS"] == "3"


def test_a_variant_is_ours_with_its_options_where_vllm_wants_them():
    text = 'big={"num_speculative_tokens": 7, "draft_vocab_size": "full"}'
    variant = engines.parse_variant(text, HEADS)
    assert variant.name == "big" and variant.ours
    assert variant.options == {
        "speculative_config": {
            "method": "medusa",
            "model": str(HEADS),
            "num_speculative_tokens": 7,
        },
        "additional_config": {"medusa": {"draft_vocab_size": "full"}},
    }
    other = engines.parse_variant('x={"heads": "elsewhere"}', HEADS)
    assert other.options == {"speculative_config": {"method": "medusa", "model": "elsewhere"}}


def test_static_trees_are_the_first_nodes_of_one_ranking():
    small, large = engines.static_trees(HEADS, [3, 7])
    options = [t.options["additional_config"]["medusa"] for t in (small, large)]
    assert all(option["sizes"] == "fixed" for option in options)
    trees = [option["tree"] for option in options]
    assert [len(tree) for tree in trees] == [3, 7] and trees[1][:3] == trees[0]
    assert (small.name, small.ours) == ("static-3", True)


def test_heads_that_vllms_chain_cannot_use_leave_it_out(tmp_path):
    for setup in (replace(SETUP, heads=tmp_path), replace(SETUP, chain_heads=tmp_path)):
        takers, missing = engines.contenders([engines.CHAIN], [], setup, tmp_path)
        assert [t.name for t in takers] == ["plain"]
        assert "holds no Medusa heads" in missing["chain"]


def test_suffix_without_its_package_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    _, missing = engines.contenders([engines.SUFFIX], [], SETUP, tmp_path)
    assert missing == {"suffix": "the package arctic-inference is not installed"}


def test_rivals_are_all_in_the_summary():
    assert set(results.RIVALS) == set(engines.NAMES) - {engines.PLAIN, engines.OURS}
