"""Prefix cache: a hit changes neither text nor acceptance, and only committed blocks are hashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE

BLOCK = 32
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(make_engine: Any) -> Any:
    return make_engine(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def medusa(make_engine: Any, random_heads: Path) -> Any:
    return make_engine(
        enable_prefix_caching=True,
        speculative_config=harness.speculation(random_heads, sizes="fixed"),
    )


def answer(engine: Any, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """Output of `prompt`, and how many of its tokens came from the prefix cache."""
    [output] = engine.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    return tuple(output.outputs[0].token_ids), output.num_cached_tokens


def drafted_answer(
    medusa: Any, prompt: list[int], expected: tuple[int, ...], hit_rate: float
) -> tuple[list[int], int]:
    """Accepted nodes of each verified draft, and cached tokens; the text is `expected`."""
    drafter = harness.plant(medusa, [harness.DEEP], VOCAB_SIZE, hit_rate)
    drafter.learn(prompt, expected)
    found, num_cached = answer(medusa, prompt)
    assert found == expected
    return list(drafter.accepted), num_cached


@pytest.mark.parametrize("draft", harness.HIT_RATES)
@pytest.mark.parametrize("num_blocks", range(4))
def test_a_hit_is_like_a_cold_run(plain: Any, medusa: Any, num_blocks: int, draft: str) -> None:
    [base] = harness.prompts(1, lengths=[160], vocab_size=VOCAB_SIZE, seed=21)
    shared = BLOCK * num_blocks
    # One token beyond the hit is a whole-prompt hit, whose first step carries placeholders.
    for tail in (1, 20):
        prompt = base[: shared + tail]
        expected, _ = answer(plain, prompt)
        medusa.reset_prefix_cache()
        cold, num_cached = drafted_answer(medusa, prompt, expected, harness.HIT_RATES[draft])
        assert num_cached == 0
        medusa.reset_prefix_cache()
        answer(medusa, [*base[:shared], 1 + base[shared]])
        warm, num_cached = drafted_answer(medusa, prompt, expected, harness.HIT_RATES[draft])
        assert num_cached == shared
        if len(warm) > len(cold):
            assert warm.pop(0) == 0, "a placeholder was accepted"
        assert warm == cold


@pytest.mark.parametrize("draft", harness.HIT_RATES)
def test_only_committed_blocks_are_hashed(plain: Any, medusa: Any, draft: str) -> None:
    """Blocks that held drafts become hits of what was committed there, and of nothing else."""
    [prompt] = harness.prompts(1, lengths=[45], vocab_size=VOCAB_SIZE, seed=22)
    expected, _ = answer(plain, prompt)
    pool = medusa.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    medusa.reset_prefix_cache()
    assert len(pool.cached_block_hash_to_block) == 0
    drafted_answer(medusa, prompt, expected, harness.HIT_RATES[draft])
    # The last token of an answer is never an input.
    written = len(prompt) + len(expected) - 1
    assert len(pool.cached_block_hash_to_block) == written // BLOCK == 2
    for length in (25, 32, len(expected)):
        longer = [*prompt, *expected[:length]]
        continued, _ = answer(plain, longer)
        _, num_cached = drafted_answer(medusa, longer, continued, harness.HIT_RATES[draft])
        assert num_cached == 2 * BLOCK
