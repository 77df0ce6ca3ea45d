"""Work for the child of `OfflineEngine` that `medusa tune` needs: prompts, records, costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from medusa_plugin.training.calibrate import split
from medusa_plugin.training.record import Answer, RecordingDrafter, loop_start
from medusa_plugin.training.self_text import MIN_ANSWER_TOKENS, reason_against
from medusa_plugin.training.tree_sizes import Yield, tokens_per_step
from medusa_plugin.tree.budget import StepCosts
from medusa_plugin.tree.estimate import HeadCalibration
from medusa_plugin.vllm_glue.offline_engine import Reporter, prompt_ids

_MARK = "medusa-user-turn"
_PROMPT_TOKENS = 128
_TRIES = 4
"""Prompts are sampled at most that many times over, where many are of no use."""


class NoUserTurnError(ValueError):
    """The model has no user turn to sample prompts from; the message says what to do."""


@dataclass(frozen=True)
class EngineFacts:
    """What the engine runs with."""

    heads: str
    """Directory of the heads."""
    num_heads: int
    num_nodes: int
    """Most nodes of a tree."""
    draft_vocab_size: int
    dtype: str
    max_model_len: int
    """Tokens that a prompt and its answer may have together."""


@dataclass(frozen=True)
class RecordRequest:
    """Prompts to answer greedily while the heads' candidates are recorded."""

    prompts: tuple[str, ...]
    max_tokens: int
    top_k: int


@dataclass(frozen=True)
class Recording:
    """Answers of at least `MIN_ANSWER_TOKENS`, loops cut, and what a step cost meanwhile."""

    answers: tuple[Answer, ...]
    costs: StepCosts


def facts(llm: Any, _: None, report: Reporter | None) -> EngineFacts:
    """See `EngineFacts`."""
    from medusa_plugin.vllm_glue.translate import medusa_config

    runner = runner_of(llm)
    drafter = runner.medusa_drafter
    return EngineFacts(
        heads=medusa_config(runner.vllm_config).heads,
        num_heads=drafter.heads.num_heads,
        num_nodes=drafter.num_nodes,
        draft_vocab_size=drafter.heads.max_top_k,
        dtype=str(runner.model_config.dtype).removeprefix("torch."),
        max_model_len=runner.model_config.max_model_len,
    )


def sample_prompts(llm: Any, count: int, report: Reporter | None) -> list[str]:
    """User prompts that the model makes up itself (Magpie: Xu et al., 2024).

    Fed with nothing but the chat template up to the user's turn, it continues with what a user
    would ask. Repeated, unfinished, very short and looping ones are left out.

    Args:
        llm: the engine.
        count: wanted; fewer come back where the model makes up too few.
        report: told how many there are.

    Raises:
        NoUserTurnError: the model has no chat template with a user turn.
    """
    tokenizer = llm.get_tokenizer()
    before, after = user_turn(tokenizer)
    ids = tokenizer.encode(before, add_special_tokens=False)
    found: dict[str, None] = {}
    for attempt in range(_TRIES):
        wanted = count - len(found)
        params = [
            prompt_params(after, 2 * count * attempt + i)  # a try asks for 2 * count at most
            for i in range(wanted + wanted // 4 + 1)
        ]
        outputs = llm.generate([{"prompt_token_ids": ids}] * len(params), params, use_tqdm=False)
        for output in outputs:
            completion = output.outputs[0]
            text = completion.text.strip()
            if completion.finish_reason == "stop" and not reason_against(
                text, completion.token_ids
            ):
                found.setdefault(text)
        if report is not None:
            report(min(len(found), count))
        if len(found) >= count:
            break
    return list(found)[:count]


def prompt_lengths(llm: Any, prompts: Sequence[str], report: Reporter | None) -> list[int]:
    """Tokens of each prompt in the model's chat template."""
    tokenizer = llm.get_tokenizer()
    return [len(prompt_ids(tokenizer, [{"role": "user", "content": prompt}])) for prompt in prompts]


def prompt_params(end_of_turn: str, seed: int, **options: Any) -> Any:
    """`SamplingParams` by which a model makes up a prompt, up to the end of the user's turn."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=1.0,
        min_p=0.005,  # top-p would sort the whole vocabulary in every step
        max_tokens=_PROMPT_TOKENS,
        stop=[end_of_turn] if end_of_turn else [],
        seed=seed,
        **options,
    )


def record(llm: Any, request: RecordRequest, report: Reporter | None) -> Recording:
    """Answer prompts greedily and record the heads' candidates at every token.

    Args:
        llm: the engine; it drafts nothing from now on.
        request: what to answer.
        report: told how many prompts are answered.
    """
    runner = runner_of(llm)
    known = runner.medusa_drafter
    drafter = RecordingDrafter(known.heads, num_nodes=known.num_nodes, costs=known.costs)
    drafter.record(request.top_k)
    runner.drafter.drafter = drafter
    # One alone first: in a batch, what a step costs besides its rows grows with the requests.
    answers = _answers(llm, drafter, request.prompts[:1], request.max_tokens, None)
    costs = drafter.costs
    assert costs is not None  # tree sizes follow the cost
    rest = request.prompts[1:]
    answers += _answers(
        llm, drafter, rest, request.max_tokens, report and (lambda done: report(1 + done))
    )
    cut = [answer.cut(loop_start(answer.tokens)) for answer in answers]
    drafter.answers = [answer for answer in cut if len(answer.tokens) >= MIN_ANSWER_TOKENS]
    # Hidden states stay here, where the heads are.
    return Recording(tuple(replace(a, hidden=None) for a in drafter.answers), costs)


def simulate(llm: Any, calibration: Sequence[HeadCalibration], report: Reporter | None) -> Yield:
    """Decode the recorded held-out answers again with trees of every size.

    Args:
        llm: the engine; `record` was its work before.
        calibration: one per head.
        report: not used.
    """
    drafter = runner_of(llm).drafter.drafter
    held_out = split(drafter.answers)[1]
    return tokens_per_step(held_out, drafter.heads, calibration, drafter.num_nodes)


def _answers(
    llm: Any,
    drafter: RecordingDrafter,
    prompts: Sequence[str],
    max_tokens: int,
    report: Reporter | None,
) -> list[Answer]:
    """The prompts' answers, in their order."""
    from vllm import SamplingParams

    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    inner_ids = []  # as the model runner sees them
    for i, prompt in enumerate(prompts):
        ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}])
        inner_ids.append(engine.add_request(str(i), {"prompt_token_ids": ids}, params))
    answers: dict[int, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                i = int(output.request_id)
                answers[i] = drafter.take(inner_ids[i], output.outputs[0].token_ids)
                if report is not None:
                    report(len(answers))
    return [answers[i] for i in sorted(answers)]


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def user_turn(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before a first user turn, and how it ends one."""
    if tokenizer.chat_template is None:
        raise NoUserTurnError(
            "the model has no chat template, so there is no user turn to sample prompts from: "
            "give prompts with --prompts FILE"
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=False, tokenize=False
    )
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise NoUserTurnError(
            "the model's chat template does not show user turns: give prompts with --prompts FILE"
        )
    return before, after.strip().split("\n")[0]
