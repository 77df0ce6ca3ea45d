"""An engine in a child process that answers one conversation at a time and streams it.

Two of them, plain and Medusa, can be measured side by side: only one works at a time, both with
the same settings. The parent never imports vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Message = dict[str, str]

START_TIMEOUT_SECONDS = 900.0  # the first compiled start takes about two minutes on 2 cores


class EngineProcessError(RuntimeError):
    """The child failed; the message ends with what it printed last."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    `options` are keyword arguments of `vllm.LLM`; `environment` is set before vLLM is imported.
    """

    options: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One answer and what it cost."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float
    """From submission to the last token."""
    steps: int
    """Engine steps that emitted tokens; the first is the prefill."""
    nodes_verified: int
    """Draft tokens that the target verified."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens per decode step, the bonus token included; 1.0 without speculation."""
        return (len(self.token_ids) - 1) / (self.steps - 1) if self.steps > 1 else 1.0


class OfflineEngine:
    """Handle of the child process.

    Args:
        settings: how to start the engine.

    Raises:
        EngineProcessError: from any method, if the child fails.
    """

    def __init__(self, settings: EngineSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        descriptor, log = tempfile.mkstemp(prefix="medusa-engine-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        self._process = context.Process(
            target=_serve, args=(child_end, settings, log), daemon=True, name="medusa-engine"
        )
        self._process.start()
        child_end.close()

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wait_until_ready(self) -> float:
        """Block until the engine is loaded and warm; returns the seconds it took."""
        return float(self._receive("ready", START_TIMEOUT_SECONDS))

    def ask(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """Answer a conversation greedily.

        Args:
            messages: chat messages (`role`, `content`).
            max_tokens: where to stop at the latest.
            on_text: called with each piece of text as it is generated.
        """
        try:
            self._connection.send((list(messages), max_tokens))
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        return self._receive("done", None, on_text)  # type: ignore[no-any-return]

    def _receive(
        self,
        expected: str,
        timeout: float | None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Any:
        while True:
            try:
                if timeout is not None and not self._connection.poll(timeout):
                    raise EngineProcessError(
                        f"the engine did not start within {timeout:.0f} s.\n{self._log_tail()}"
                    )
                kind, value = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._ended() from None
            if kind == "text":
                on_text(value)
            elif kind == "error":
                raise EngineProcessError(f"the engine failed: {value}\n{self._log_tail()}")
            elif kind == expected:
                return value

    def _ended(self) -> EngineProcessError:
        self._process.join(5)
        return EngineProcessError(
            f"the engine process ended with exit code {self._process.exitcode}.\n"
            + self._log_tail()
        )

    def _log_tail(self, lines: int = 15) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """End the child, by force if it does not end by itself."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.unlink(missing_ok=True)


def _serve(connection: Connection, settings: EngineSettings, log: str) -> None:
    """Body of the child: everything it prints goes to `log`, answers go through the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(settings.environment)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the loop below steps the engine itself
    try:
        started = time.perf_counter()
        from vllm import LLM

        llm = LLM(disable_log_stats=False, use_tqdm_on_load=False, **settings.options)
        _answer(llm, [{"role": "user", "content": "Hello"}], 8, lambda text: None)
        connection.send(("ready", time.perf_counter() - started))
        while True:
            messages, max_tokens = connection.recv()
            completion = _answer(
                llm, messages, max_tokens, lambda text: connection.send(("text", text))
            )
            connection.send(("done", completion))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))


def _answer(
    llm: Any, messages: list[Message], max_tokens: int, on_text: Callable[[str], None]
) -> Completion:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    prompt = llm.get_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    nodes_before = _drafted_tokens(llm)
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    token_ids: list[int] = []
    text, steps = "", 0
    started = time.perf_counter()
    llm.llm_engine.add_request("demo", {"prompt_token_ids": prompt}, params)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            delta = output.outputs[0]
            token_ids += delta.token_ids
            text += delta.text
            steps += bool(delta.token_ids)
            if delta.text:
                on_text(delta.text)
    seconds = time.perf_counter() - started
    return Completion(tuple(token_ids), text, seconds, steps, _drafted_tokens(llm) - nodes_before)


def _drafted_tokens(llm: Any) -> int:
    """vLLM's own counter of draft tokens verified so far."""
    return sum(
        int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:spec_decode_num_draft_tokens"
    )
