"""Keeps the hidden states that vLLM's own runner chose a request's tokens from."""

from __future__ import annotations

from typing import Any

import torch


class HiddenRecorder:
    """As a context, looks at every step of an engine between its forward pass and sampling.

    Args:
        runner: vLLM's model runner, in this process and without speculation.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._kept: dict[str, dict[int, torch.Tensor]] = {}

    def __enter__(self) -> HiddenRecorder:
        runner, sample = self._runner, self._runner.sample_tokens

        def look_and_sample(*args: Any, **kwargs: Any) -> Any:
            if runner.execute_model_state is not None:
                self._look(runner.execute_model_state.sample_hidden_states)
            return sample(*args, **kwargs)

        runner.sample_tokens = look_and_sample
        return self

    def __exit__(self, *exception: object) -> None:
        del self._runner.sample_tokens  # the class's own shows again

    def watch(self, request_id: str) -> None:
        """Keep the states of a request.

        Args:
            request_id: as the runner knows it; what `LLMEngine.add_request` returns.
        """
        self._kept[request_id] = {}

    def take(self, request_id: str, length: int) -> torch.Tensor:
        """The states of a watched request, which is watched no longer.

        Args:
            request_id: as for `watch`.
            length: answer tokens wanted.

        Returns:
            bf16 `[length, hidden_size]` the state, after the final norm, from which each of the
            first tokens of the answer was chosen.
        """
        rows = self._kept.pop(request_id)
        if not length:
            return torch.empty(0, 0, dtype=torch.bfloat16)
        return torch.stack([rows[i] for i in range(length)])

    def _look(self, hidden: torch.Tensor) -> None:
        """Keep the rows, `[num_requests, hidden_size]`, of a step."""
        batch = self._runner.input_batch
        ends = self._runner.seq_lens[: len(hidden)].tolist()
        rows = hidden.to("cpu", torch.bfloat16, copy=True)
        for i, request_id in enumerate(batch.req_ids[: len(hidden)]):
            # Negative in a part of a prompt that is not its last; computed again, and the same,
            # where a preempted request goes on.
            place = ends[i] - int(batch.num_prompt_tokens[i])
            if place >= 0 and request_id in self._kept:
                self._kept[request_id][place] = rows[i].clone()
