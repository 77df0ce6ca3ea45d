"""Hidden states for training are those that the engine has when it chooses the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams

from medusa_plugin.training.hidden_states import extract
from medusa_plugin.training.target import Target
from medusa_plugin.training.texts import Text
from tests.engine import harness
from tests.engine.conftest import VOCAB_SIZE


def test_they_are_the_runners_own(make_engine: Any, tiny_model: Path, tmp_path: Path) -> None:
    engine = make_engine()
    runner = harness.runner_of(engine)
    prompts = harness.prompts(5, lengths=[3, 9, 40, 17, 1], vocab_size=VOCAB_SIZE, seed=2)
    lengths = [14, 3, 30, 1, 22]
    seen: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}

    def keep(module: Any, arguments: Any, outputs: tuple[torch.Tensor, Any]) -> None:
        starts = runner.query_start_loc.np
        for i, request_id in enumerate(runner.input_batch.req_ids):
            prompt = tuple(runner.requests[request_id].prompt_token_ids)
            for row in range(int(starts[i]), int(starts[i + 1])):
                place = int(runner.positions[row])
                seen.setdefault(prompt, {})[place] = outputs[0][row].clone()

    handle = runner.model.model.norm.register_forward_hook(keep)
    try:
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths],
            use_tqdm=False,
        )
    finally:
        handle.remove()
    texts = []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = (*prompt, *output.outputs[0].token_ids)
        texts.append(Text(ids, ((len(prompt), len(ids)),)))

    target = Target(str(tiny_model), torch.float32, torch.device("cpu"))
    lm_head = target.spec().lm_head
    ours = target.hidden_states(texts)
    for text, hidden, prompt in zip(texts, ours, prompts, strict=True):
        assert len(hidden) == len(text.token_ids) - len(prompt)
        for row, states in enumerate(hidden):
            theirs = seen[tuple(prompt)][len(prompt) - 1 + row]
            torch.testing.assert_close(states, theirs, rtol=1e-4, atol=1e-4)
        # The state before a token is the one from which it was chosen.
        assert (hidden @ lm_head.T).argmax(-1).tolist() == list(text.token_ids[len(prompt) :])

    (shard,) = extract(target, texts, tmp_path)
    stored, tokens = shard.read()
    assert torch.equal(stored, torch.cat(ours).to(torch.bfloat16))
    assert tokens.tolist() == [
        token for text in texts for token in text.token_ids[text.answers[0][0] :]
    ]
    assert shard.lengths.tolist() == lengths
