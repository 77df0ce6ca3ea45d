"""Record greedy generations of an engine, for `divergence.compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medusa_plugin.divergence import Generation, RecordedRun
from medusa_plugin.vllm_glue.offline_engine import Reporter, prompt_ids

TOP_LOGPROBS = 10


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts to answer greedily; `source` is what the run is to be called."""

    source: str
    prompts: tuple[str, ...]
    """User turns, put into the model's chat template."""
    max_tokens: int


def record_run(llm: Any, request: GenerateRequest, report: Reporter | None = None) -> RecordedRun:
    """Answer prompts greedily, all in one batch, with the likeliest tokens at each position.

    Args:
        llm: a `vllm.LLM`.
        request: what to answer.
        report: told how many prompts are answered.
    """
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts = [
        prompt_ids(tokenizer, [{"role": "user", "content": prompt}]) for prompt in request.prompts
    ]
    params = SamplingParams(temperature=0, max_tokens=request.max_tokens, logprobs=TOP_LOGPROBS)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    if report is not None:
        report(len(outputs))
    dtype: Any = str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    return RecordedRun(
        source=request.source,
        dtype=dtype,
        generations=tuple(
            Generation(
                prompt=tuple(prompt),
                token_ids=tuple(output.outputs[0].token_ids),
                logprobs=tuple(
                    {token: entry.logprob for token, entry in position.items()}
                    for position in output.outputs[0].logprobs
                ),
            )
            for prompt, output in zip(prompts, outputs, strict=True)
        ),
    )
