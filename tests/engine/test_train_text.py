"""`medusa train` from prompts to heads, each process with an engine of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from medusa_plugin.heads import peek_heads
from medusa_plugin.training.self_text import Conversation, SelfTextFile
from tests.training import models

ROOT = Path(__file__).parents[2]
VERSE = "why does the old ship sink in calm water and who hears its bell at night"


def test_two_processes_share_prompts_and_answer_each_once(tmp_path: Path) -> None:
    model, prompts, out = tmp_path / "model", tmp_path / "prompts.txt", tmp_path / "out"
    model.mkdir()
    models.write_llama(model)
    # More tokens than an engine reads in a step, so that a seeded prompt would be read in parts.
    asked = [f"{VERSE[i % 30 :]} {i}".strip() for i in range(120)]
    prompts.write_text("\n".join(asked))
    arguments = ["train", str(model), "--out", str(out), "--prompts", str(prompts)]
    arguments += ["--temperature", "1", "--max-answer-tokens", "40", "--tokens", "1000000"]
    arguments += ["--width", "48", "--output-rank", "16", "--draft-vocab-size", "100"]
    arguments += ["--epochs", "1", "--batch-size", "64", "--num-heads", "2", "--device", "cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--standalone", "-m", "medusa_plugin.commands.main", *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Compiling a tiny model takes longer than running it.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
    }
    done = subprocess.run(launch, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for rank in range(2):
        items = list(SelfTextFile(out / f"work/self_text_{rank}.jsonl"))
        made = [item for item in items if isinstance(item, Conversation)]
        assert len(made) > 10 and all(item.hidden is not None for item in made)
        assert len(items) == 60, "every prompt has an answer or a reason against it"
        found += [item.prompt for item in made]
    assert len(set(found)) == len(found) and set(found) <= set(asked)
    assert peek_heads(out).tuning is not None
    assert json.loads((out / "training.json").read_text())["step"] > 3
