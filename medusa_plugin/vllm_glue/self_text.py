"""Work for the child of `OfflineEngine`: conversations that the model makes with itself.

Fed with nothing but the chat template up to the user's turn, a chat model continues with what a
user would ask (Magpie: Xu et al., 2024, arXiv:2406.08464); then it answers itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medusa_plugin.training.record import loop_start
from medusa_plugin.training.self_text import (
    MIN_ANSWER_TOKENS,
    Conversation,
    Made,
    Skipped,
    opener_of,
    reason_against,
)
from medusa_plugin.vllm_glue.hidden_recorder import HiddenRecorder
from medusa_plugin.vllm_glue.offline_engine import Reporter, prompt_ids
from medusa_plugin.vllm_glue.recording import prompt_params, runner_of, user_turn

_LOOK_FOR_LOOPS_EVERY = 32
"""Tokens; a looping answer would otherwise take its room to the end."""


@dataclass(frozen=True)
class SelfTextRequest:
    """Which conversations to make."""

    done: frozenset[int]
    """Indices to pass over; the others count up from 0 until `tokens` are made."""
    tokens: int
    """Answer tokens to make, at least."""
    max_answer_tokens: int
    temperature: float
    """Of the answers; prompts are sampled at 1."""
    seed: int
    prompts: tuple[str, ...] | None = None
    """A user's own, by index, instead of made-up ones; all are answered, unless `tokens` are made
    before."""


def make_self_text(llm: Any, request: SelfTextRequest, report: Reporter | None) -> int:
    """Make conversations and report each, or why there is none, as soon as it is known.

    Args:
        llm: the engine; it drafts nothing.
        request: what to make.
        report: takes a `Made` or `Skipped`.

    Returns:
        The answer tokens made.

    Raises:
        NoUserTurnError: the model has no chat template with a user turn.
    """
    assert report is not None
    made = 0
    with HiddenRecorder(runner_of(llm)) as recorder:
        maker = _Maker(llm, request, recorder)
        for item in maker.run():
            report(item)
            if isinstance(item, Made):
                made += len(item.conversation.answer_ids)
                if made >= request.tokens:
                    maker.stop()
    return made


class _Maker:
    """Keeps the engine full of prompts being made up and prompts being answered."""

    def __init__(self, llm: Any, request: SelfTextRequest, recorder: HiddenRecorder) -> None:
        self._engine = llm.llm_engine
        self._recorder = recorder
        self._tokenizer = llm.get_tokenizer()
        self._request = request
        config = self._engine.vllm_config
        self._in_flight = config.scheduler_config.max_num_seqs
        self._room = config.model_config.max_model_len
        self._before, self._after = "", ""
        if request.prompts is None:
            self._before, self._after = user_turn(self._tokenizer)
        self._index = 0
        self._prompts: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._texts: dict[str, str] = {}
        self._inner_ids: dict[int, str] = {}
        self._no_room: list[Skipped] = []
        self._stopped = False

    def stop(self) -> None:
        """Ask nothing more; what is under way is dropped."""
        self._stopped = True
        self._engine.abort_request(list(self._tokens))

    def run(self) -> Iterator[Made | Skipped]:
        """Results as they come, until stopped."""
        while not self._stopped:
            while len(self._tokens) < self._in_flight and self._ask():
                pass
            while self._no_room:
                yield self._no_room.pop(0)
            if not self._tokens:
                return
            for output in self._engine.step():
                if output.request_id not in self._tokens or self._stopped:
                    continue
                found = self._advance(output.request_id, output.outputs[0])
                if found is not None:
                    yield found

    def _ask(self) -> bool:
        """Submit the next request; False where the user's prompts are at their end."""
        while self._index in self._request.done:
            self._index += 1
        index, prompts = self._index, self._request.prompts
        if prompts is not None and index >= len(prompts):
            return False
        self._index += 1
        if prompts is None:
            self._ask_for_prompt(index)
        else:
            self._ask_for_answer(index, prompts[index])
        return True

    def _ask_for_prompt(self, index: int) -> None:
        from vllm.sampling_params import RequestOutputKind

        seed = self._request.seed + index
        params = prompt_params(self._after, seed, output_kind=RequestOutputKind.DELTA)
        ids = self._tokenizer.encode(self._before + opener_of(index), add_special_tokens=False)
        self._add(f"prompt-{index}", ids, params)

    def _ask_for_answer(self, index: int, text: str) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = prompt_ids(self._tokenizer, [{"role": "user", "content": text}])
        if len(ids) + MIN_ANSWER_TOKENS > self._room:
            self._no_room.append(Skipped(index, "prompt too long"))
            return
        params = SamplingParams(
            temperature=self._request.temperature,
            seed=self._request.seed + index if self._request.temperature else None,
            max_tokens=min(self._request.max_answer_tokens, self._room - len(ids)),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._prompts[index] = text, tuple(ids)
        self._inner_ids[index] = self._add(f"answer-{index}", ids, params)
        self._recorder.watch(self._inner_ids[index])

    def _add(self, request_id: str, ids: list[int], params: Any) -> str:
        """Submit a request; returns its id as the runner knows it."""
        self._tokens[request_id], self._texts[request_id] = [], ""
        inner_id: str = self._engine.add_request(request_id, {"prompt_token_ids": ids}, params)
        return inner_id

    def _advance(self, request_id: str, delta: Any) -> Made | Skipped | None:
        kind, _, number = request_id.partition("-")
        tokens, before = self._tokens[request_id], len(self._tokens[request_id])
        tokens += delta.token_ids
        self._texts[request_id] += delta.text
        ended = delta.finish_reason is not None
        if kind == "prompt":
            return self._end_prompt(int(number), delta.finish_reason) if ended else None
        if not ended and before // _LOOK_FOR_LOOPS_EVERY == len(tokens) // _LOOK_FOR_LOOPS_EVERY:
            return None
        length = loop_start(np.array(tokens))
        if not ended and length == len(tokens):
            return None
        if not ended:
            self._engine.abort_request([request_id])
        return self._end_answer(int(number), tuple(tokens[:length]))

    def _end_prompt(self, index: int, finish_reason: str) -> Skipped | None:
        tokens = self._tokens.pop(f"prompt-{index}")
        text = (opener_of(index) + self._texts.pop(f"prompt-{index}")).strip()
        reason = "unfinished prompt" if finish_reason != "stop" else reason_against(text, tokens)
        if reason is not None:
            return Skipped(index, reason)
        self._ask_for_answer(index, text)
        return None

    def _end_answer(self, index: int, answer: tuple[int, ...]) -> Made | Skipped:
        del self._tokens[f"answer-{index}"], self._texts[f"answer-{index}"]
        text, ids = self._prompts.pop(index)
        hidden = self._recorder.take(self._inner_ids.pop(index), len(answer))
        if len(answer) < MIN_ANSWER_TOKENS:
            return Skipped(index, "short answer")
        return Made(Conversation(index, text, ids, answer), hidden.view(torch.int16).numpy())
