"""An engine in a child process that answers a conversation, streamed, or a batch of them.

Several of them, plain and Medusa, can be measured side by side: only one works at a time, all with
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

from medusa_plugin.vllm_glue.stage_clock import StageClock, engine_stages

Message = dict[str, str]
Reporter = Callable[[Any], None]
Work = Callable[[Any, Any, Reporter | None], Any]

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


def quiet_environment() -> dict[str, str]:
    """For commands: warnings only, and 1 GB of KV cache on a CPU unless the user says otherwise."""
    return {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }


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


@dataclass(frozen=True)
class Batch:
    """Conversations that are submitted together."""

    conversations: tuple[tuple[Message, ...], ...]
    max_tokens: int
    """Where each stops at the latest."""
    temperature: float = 0.0
    seeds: tuple[int, ...] | None = None
    """One per conversation; None for vLLM's own generator."""
    ignore_eos: bool = False
    """Whether every answer goes on to `max_tokens`."""
    in_flight: int | None = None
    """Requests at a time: as one ends, the next is submitted. None: all at once."""
    time_stages: bool = False
    """Whether to time the stages of each step, which costs some microseconds a step."""


@dataclass(frozen=True)
class BatchCompletion:
    """The answers to a `Batch`, in its order, and what they cost together."""

    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    request_steps: tuple[int, ...]
    """For each request, the engine steps in which it gained tokens; the first is its prefill."""
    seconds: float
    """From the first submission until the last token of all."""
    steps: int
    """Engine steps."""
    drafted: int
    """Draft tokens that the target verified."""
    accepted: int
    """Those of them that became part of an answer."""
    stages: tuple[dict[str, float], ...] = ()
    """Where `Batch.time_stages`: seconds of each decode step ("step") and of its stages."""


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
        answer: BatchCompletion = self.run(_answer, Batch((tuple(messages),), max_tokens), on_text)
        return Completion(
            answer.token_ids[0],
            answer.texts[0],
            answer.seconds,
            answer.request_steps[0],
            answer.drafted,
        )

    def generate_batch(self, batch: Batch) -> BatchCompletion:
        """Answer conversations together."""
        completion: BatchCompletion = self.run(_answer, batch)
        return completion

    @property
    def resident_bytes(self) -> int:
        """Memory that the child has in use, of which the KV cache is a part."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def run(self, work: Work, argument: Any, on_report: Reporter | None = None) -> Any:
        """Run `work` in the child and return its result.

        Args:
            work: function of a module, called with the `vllm.LLM`, `argument`, and a function that
                takes reports (None without `on_report`). All that passes is pickled.
            argument: for `work`.
            on_report: called here with each report.
        """
        try:
            self._connection.send((work, argument, on_report is not None))
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        return self._receive("done", None, on_report)

    def _receive(
        self,
        expected: str,
        timeout: float | None,
        on_report: Reporter | None = None,
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
            if kind == "report" and on_report is not None:
                on_report(value)
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
        _answer(llm, Batch((({"role": "user", "content": "Hello"},),), 8))
        connection.send(("ready", time.perf_counter() - started))
        while True:
            work, argument, reports = connection.recv()
            report = (lambda value: connection.send(("report", value))) if reports else None
            connection.send(("done", work(llm, argument, report)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))


def _answer(llm: Any, batch: Batch, on_text: Reporter | None = None) -> BatchCompletion:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokenizer = llm.get_tokenizer()
    prompts = [prompt_ids(tokenizer, messages) for messages in batch.conversations]
    count = len(prompts)
    params = [
        SamplingParams(
            temperature=batch.temperature,
            seed=batch.seeds[i] if batch.seeds is not None else None,
            max_tokens=batch.max_tokens,
            ignore_eos=batch.ignore_eos,
            output_kind=RequestOutputKind.DELTA,
        )
        for i in range(count)
    ]
    token_ids: list[list[int]] = [[] for _ in range(count)]
    texts, request_steps, steps = [""] * count, [0] * count, 0
    engine = llm.llm_engine
    drafted, accepted = _draft_counters(llm)
    in_flight = batch.in_flight or count
    with StageClock(engine_stages(llm) if batch.time_stages else {}) as clock:
        started = time.perf_counter()
        submitted = 0
        while True:
            while submitted < count and engine.get_num_unfinished_requests() < in_flight:
                prompt = {"prompt_token_ids": prompts[submitted]}
                engine.add_request(str(submitted), prompt, params[submitted])
                submitted += 1
            if not engine.has_unfinished_requests():
                break
            decoding = all(token_ids[:submitted])  # else some prompts are still to be read
            step_started = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - step_started
            for output in outputs:
                i, delta = int(output.request_id), output.outputs[0]
                token_ids[i] += delta.token_ids
                texts[i] += delta.text
                request_steps[i] += bool(delta.token_ids)
                if on_text is not None and delta.text:
                    on_text(delta.text)
            steps += 1
            clock.end_step(seconds, keep=batch.time_stages and decoding)
        seconds = time.perf_counter() - started
    drafted_now, accepted_now = _draft_counters(llm)
    return BatchCompletion(
        token_ids=tuple(map(tuple, token_ids)),
        texts=tuple(texts),
        request_steps=tuple(request_steps),
        seconds=seconds,
        steps=steps,
        drafted=drafted_now - drafted,
        accepted=accepted_now - accepted,
        stages=tuple(clock.steps),
    )


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation; its plain text where the model has no chat template."""
    if tokenizer.chat_template is None:
        plain: list[int] = tokenizer.encode("\n".join(message["content"] for message in messages))
        return plain
    ids: list[int] = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False
    )
    return ids


def _draft_counters(llm: Any) -> tuple[int, int]:
    """vLLM's own counters of draft tokens verified and accepted so far."""
    totals = {
        "vllm:spec_decode_num_draft_tokens": 0,
        "vllm:spec_decode_num_accepted_tokens": 0,
    }
    for metric in llm.get_metrics():
        if metric.name in totals:
            totals[metric.name] += int(metric.value)
    drafted, accepted = totals.values()
    return drafted, accepted
