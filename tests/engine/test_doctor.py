"""`medusa doctor compare --live`: both engines, their recordings and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from medusa_plugin.commands.main import app
from medusa_plugin.divergence import read_run, write_run
from medusa_plugin.vllm_glue.generations import TOP_LOGPROBS


def test_live_runs_are_equal_in_float32_and_can_be_compared_again(
    tiny_model: Path, random_heads: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tell me about ships.\nAnd about bread.\n")
    out = tmp_path / "out"
    arguments = ["--live", str(tiny_model), "--heads", str(random_heads), "--prompts", str(prompts)]
    arguments += ["--max-tokens", "16", "--dtype", "float32", "--record", str(out)]
    result = CliRunner().invoke(app, ["doctor", "compare", *arguments])
    assert result.exit_code == 0, result.output
    assert "2 equal" in " ".join(result.output.split())
    files = [out / "plain.json", out / "medusa.json"]
    plain, medusa = map(read_run, files)
    for run in (plain, medusa):
        assert run.dtype == "float32"
        assert [len(g.token_ids) for g in run.generations] == [16, 16]
        assert all(len(known) >= TOP_LOGPROBS for g in run.generations for known in g.logprobs)

    # A planted fault: the second answer takes another turn at position 3.
    changed: Any = json.loads(medusa.model_dump_json())
    answer = changed["generations"][1]
    ranked = sorted(answer["logprobs"][3].items(), key=lambda item: -item[1])
    answer["token_ids"][3] = int(ranked[4][0])
    write_run(type(medusa).model_validate(changed), files[1])
    result = CliRunner().invoke(
        app, ["doctor", "compare", *map(str, files), "--json", str(out / "report.json")]
    )
    assert result.exit_code == 1
    [first, second] = json.loads((out / "report.json").read_text())["partings"]
    assert first is None and (second["position"], second["verdict"]) == (3, "fault")
