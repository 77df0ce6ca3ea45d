"""The text that `medusa train` learns from: read, or made by the model in engines of its own."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from medusa_plugin.commands.prompts import read_prompts
from medusa_plugin.vllm_glue.offline_engine import (
    EngineSettings,
    OfflineEngine,
    quiet_environment,
)

if TYPE_CHECKING:
    from medusa_plugin.training.pipeline import Plan
    from medusa_plugin.training.self_text import SelfTextFile
    from medusa_plugin.training.texts import Text

_IN_FLIGHT = 128
_MAX_MODEL_LEN = 4096
_SEEDS_APART = 10_000_000
"""Between the prompts of one process and those of the next."""


@dataclass(frozen=True)
class TextSource:
    """Where the text comes from."""

    prompts: Path | None
    conversations: Path | None
    tokens: int
    max_answer_tokens: int
    temperature: float

    def describe(self) -> str:
        """One phrase for the report."""
        if self.conversations is not None:
            return f"conversations of {self.conversations.name}"
        asked = "made up by the model itself" if self.prompts is None else self.prompts.name
        how = f"temperature {self.temperature}" if self.temperature else "greedy"
        return f"prompts {asked}, answered by the model ({how}), loops cut"


@dataclass(frozen=True)
class _Process:
    """One of those that torchrun started, or the only one."""

    rank: int
    world: int

    @classmethod
    def this(cls) -> _Process:
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def texts_of(progress: Progress, plan: Plan, source: TextSource) -> list[Text]:
    """All texts, the same in every process; each process makes its share of them.

    Raises:
        TrainingError: there is no text of use, an earlier run made its text in another way, or
            the disk is too small.
        PromptsError: the prompts can't be read.
        EngineProcessError: the engine failed.
    """
    from medusa_plugin.training.pipeline import require_same_text
    from medusa_plugin.training.self_text import SelfTextFile
    from medusa_plugin.training.texts import TrainingError, self_made_texts

    if source.conversations is not None:
        from transformers import AutoTokenizer

        from medusa_plugin.training.chat_texts import read_conversations

        return read_conversations(source.conversations, AutoTokenizer.from_pretrained(plan.model))
    process = _Process.this()
    plan.work.mkdir(parents=True, exist_ok=True)
    if not process.rank:
        prompts = None if source.prompts is None else source.prompts.read_text(encoding="utf-8")
        require_same_text(
            plan,
            {
                "prompts": prompts and hashlib.sha256(prompts.encode()).hexdigest(),
                "max_answer_tokens": source.max_answer_tokens,
                "temperature": source.temperature,
                "processes": process.world,
            },
        )
    files = [plan.work / f"self_text_{rank}.jsonl" for rank in range(process.world)]
    _make(progress, plan, source, SelfTextFile(files[process.rank]), process)
    _wait()
    texts = self_made_texts([SelfTextFile(file) for file in files])
    if not texts:
        raise TrainingError("the model gave no answer of use: give other --prompts")
    return texts


def _make(
    progress: Progress, plan: Plan, source: TextSource, file: SelfTextFile, process: _Process
) -> None:
    """Let the model make this process's share of the text; nothing where it is there."""
    from medusa_plugin.training.hidden_states import require_room
    from medusa_plugin.training.self_text import Conversation, Made
    from medusa_plugin.vllm_glue.self_text import SelfTextRequest, make_self_text

    items = list(file)
    made = sum(len(item.answer_ids) for item in items if isinstance(item, Conversation))
    wanted = -(-source.tokens // process.world)
    asked = None
    if source.prompts is not None:
        prompts = [turns[0] for turns in read_prompts(source.prompts)]
        asked = tuple(prompts[process.rank :: process.world])
    done = frozenset(item.index for item in items)
    bar = progress.add_task("Text", total=wanted, completed=min(made, wanted))
    if made < wanted and (asked is None or len(done) < len(asked)):
        require_room(plan.work, (source.tokens - made) * 2 * _config(plan).hidden_size)
        with OfflineEngine(_engine(plan, process)) as engine:
            engine.wait_until_ready()

            def report(item: Any) -> None:
                file.append(item)
                if isinstance(item, Made):
                    progress.advance(bar, len(item.conversation.answer_ids))

            request = SelfTextRequest(
                done,
                wanted - made,
                source.max_answer_tokens,
                source.temperature,
                plan.fit.seed + process.rank * _SEEDS_APART,
                asked,
            )
            engine.run(make_self_text, request, report)
    progress.update(bar, total=1, completed=1)


def _config(plan: Plan) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(plan.model).get_text_config()


def _engine(plan: Plan, process: _Process) -> EngineSettings:
    """Of this process alone: one thread, or one device, of those that torchrun shares out."""
    longest = getattr(_config(plan), "max_position_embeddings", None) or _MAX_MODEL_LEN
    room = min(longest, _MAX_MODEL_LEN)
    options: dict[str, Any] = {
        "model": plan.model,
        "dtype": "auto" if plan.fit.bf16 else "float32",
        "max_num_seqs": _IN_FLIGHT,
        "max_model_len": room,
        # vLLM 0.32 ends on a CPU where a seeded request's prompt is read in parts.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(room, 2048),
        "seed": plan.fit.seed,
    }
    environment = quiet_environment()
    if process.world > 1:
        # The engine is a world of its own.
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        if plan.device.type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", "0"))
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = shown.split(",")[local] if shown else str(local)
    return EngineSettings(options, environment)


def _wait() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
