"""First differing tokens: what is a tie, what is a fault, and files that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medusa_plugin.commands.main import app
from medusa_plugin.divergence import (
    Generation,
    RecordedRun,
    RunFileError,
    compare,
    read_run,
    write_run,
)
from medusa_plugin.vllm_glue.offline_engine import EngineProcessError

TOKENS = (5, 6, 7, 8)


def run(
    *answers: tuple[tuple[int, ...], dict[int, dict[int, float]]], **fields: Any
) -> RecordedRun:
    """A run whose logprobs are -0.1 of the own token, but for the positions given."""
    return RecordedRun(
        **{"source": "test", "dtype": "bfloat16", **fields},
        generations=tuple(
            Generation(
                prompt=(1, i),
                token_ids=tokens,
                logprobs=tuple(known.get(p, {token: -0.1}) for p, token in enumerate(tokens)),
            )
            for i, (tokens, known) in enumerate(answers)
        ),
    )


def parted(gap_a: float, gap_b: float, **fields: Any) -> Any:
    """Runs that part at position 2, each side with its gap; afterwards nothing is alike."""
    a = run(((5, 6, 7, 8), {2: {7: -1.0, 9: -1.0 - gap_a}}), **fields)
    b = run(((5, 6, 9, 1), {2: {9: -1.0, 7: -1.0 - gap_b}}), **fields)
    return compare(a, b)


def test_equal_runs() -> None:
    report = compare(run((TOKENS, {}), ((), {})), run((TOKENS, {}), ((), {})))
    assert report.partings == (None, None) and report.faults == 0


@pytest.mark.parametrize(
    ("dtype", "magnitude", "rounding"),
    [
        # Neighbours below 32 are 0.125 apart in bfloat16: 8 bits for numbers from 16 to 32.
        ("bfloat16", 32.0, 4 * 0.125),
        ("bfloat16", 20.0, 4 * 0.125),
        ("bfloat16", 33.0, 4 * 0.25),
        ("bfloat16", 1.0, 4 * 2**-8),
        ("float16", 32.0, 4 * 2**-6),
        ("float32", 32.0, 64 * 2**-19),
    ],
)
def test_what_counts_as_rounding(dtype: str, magnitude: float, rounding: float) -> None:
    fields = {"dtype": dtype, "logit_magnitude": magnitude}
    assert parted(0, 0, **fields).rounding == rounding
    below, above = rounding * 0.99, rounding * 1.01
    assert parted(below, below, **fields).partings[0].verdict == "tie"
    assert parted(below, above, **fields).partings[0].verdict == "fault"
    assert parted(above, below, **fields).partings[0].verdict == "fault"


def test_neighbours_are_as_far_apart_as_torch_has_them() -> None:
    import torch

    for dtype, steps in (("bfloat16", 4), ("float16", 4), ("float32", 64)):
        below = torch.tensor(32.0, dtype=getattr(torch, dtype))
        neighbour = torch.nextafter(below, torch.zeros_like(below))
        assert parted(0, 0, dtype=dtype).rounding == steps * float(below - neighbour)


def test_the_first_difference_is_reported_with_both_gaps() -> None:
    parting = parted(0.25, 7.5).partings[0]
    assert (parting.position, parting.tokens) == (2, (7, 9))
    assert parting.gaps == pytest.approx((0.25, 7.5))
    assert parting.verdict == "fault" and "no gap above 0.5" in parting.reason


def test_other_faults() -> None:
    ended = compare(run((TOKENS[:2], {})), run((TOKENS, {}))).partings[0]
    assert ended is not None and (ended.position, ended.tokens) == (2, (None, 7))
    assert ended.verdict == "fault" and "ended" in ended.reason
    unknown = compare(run(((5, 6), {})), run(((5, 7), {1: {7: -1.0, 6: -1.1}}))).partings[0]
    assert unknown is not None and unknown.verdict == "fault" and "not among" in unknown.reason
    assert unknown.gaps[0] is None and unknown.gaps[1] == pytest.approx(0.1)
    sampled = parted(-0.2, 0.1).partings[0]
    assert sampled.verdict == "fault" and "greedy" in sampled.reason


def test_the_coarser_dtype_counts() -> None:
    assert compare(run((TOKENS, {}), dtype="float32"), run((TOKENS, {}))).rounding == 0.5


def test_other_prompts_cannot_be_compared() -> None:
    with pytest.raises(RunFileError, match="1 and 2 prompts"):
        compare(run((TOKENS, {})), run((TOKENS, {}), (TOKENS, {})))
    other = run((TOKENS, {})).model_copy(
        update={"generations": (Generation(prompt=(9,), token_ids=(), logprobs=()),)}
    )
    with pytest.raises(RunFileError, match="differ in prompt 0"):
        compare(run((TOKENS, {})), other)


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    known = run((TOKENS, {1: {6: -0.5, 9: -0.75}}))
    write_run(known, tmp_path / "new" / "run.json")
    assert read_run(tmp_path / "new" / "run.json") == known
    (tmp_path / "file").touch()
    with pytest.raises(RunFileError, match="cannot be written"):
        write_run(known, tmp_path / "file" / "run.json")


GOOD = json.loads(run((TOKENS, {})).model_dump_json())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a recorded run"),
        ("[" * 100_000, "is not a recorded run"),
        ('{"generations":' * 100_000, "recursion limit exceeded"),
        (json.dumps(GOOD)[:-1], "EOF while parsing"),
        (json.dumps(GOOD) * 2, "trailing characters"),
        (b"\xff", "cannot be read"),
        (json.dumps(GOOD).encode("utf-16"), "cannot be read"),
        (json.dumps([GOOD]), "should be an object"),
        ("null", "should be an object"),
        ("{}", "source: Field required"),
        (json.dumps({"source": "a", "dtype": "float32"}), "generations: Field required"),
        ({"generations": [{"prompt": [1]}]}, "generations.0.token_ids: Field required"),
        ({"generations": [{**GOOD["generations"][0], "prompt": ["x"]}]}, "valid integer"),
        ({"version": 2}, "version"),
        ({"dtype": "int8"}, "dtype"),
        ({"logit_magnitude": 0}, "logit_magnitude"),
        ({"generations": []}, "generations"),
        ({"more": 1}, "more"),
        (
            {"generations": [{"prompt": [1], "token_ids": [2], "logprobs": []}]},
            "1 tokens, but logprobs of 0",
        ),
        (
            {"generations": [{"prompt": [1], "token_ids": [2], "logprobs": [{"3": 0}]}]},
            "no logprob of the generated token 2",
        ),
        (
            {"generations": [{"prompt": [1], "token_ids": [2], "logprobs": [{"2": "NaN"}]}]},
            "finite",
        ),
    ],
)
def test_bad_files_end_the_command_with_2(tmp_path: Path, content: Any, message: str) -> None:
    file, good = tmp_path / "a.json", tmp_path / "b.json"
    good.write_text(json.dumps(GOOD))
    if isinstance(content, dict):
        content = json.dumps(GOOD | content)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for arguments in ([file, good], [good, file]):
        result = CliRunner().invoke(app, ["doctor", "compare", *map(str, arguments)])
        said = "".join(result.output.split())
        assert result.exit_code == 2, result.output
        assert "".join(message.split()) in said and "a.json" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder", "Is a directory"),
        ("absent", "No such file"),
        ("x" * 300, "File name too long"),
        ("\udcff", "\\udcff cannot be read"),
        ("[bold]", "[bold] cannot be read"),
    ],
    ids=["folder", "absent", "long", "bytes", "markup"],
)
def test_paths_that_are_no_files_end_the_command_with_2(
    tmp_path: Path, name: str, message: str
) -> None:
    good = tmp_path / "b.json"
    good.write_text(json.dumps(GOOD))
    (tmp_path / "folder").mkdir()
    for arguments in ([tmp_path / name, good], [good, tmp_path / name]):
        result = CliRunner().invoke(app, ["doctor", "compare", *map(str, arguments)])
        assert result.exit_code == 2, result.output
        assert "".join(message.split()) in "".join(result.output.split())


def test_runs_of_other_prompts_end_the_command_with_2_and_other_lengths_with_1(
    tmp_path: Path,
) -> None:
    known = run((TOKENS, {}), (TOKENS, {}))
    others = {
        "fewer": (run((TOKENS, {})), 2, "2 and 1 prompts"),
        "swapped": (known.model_copy(update={"generations": known.generations[::-1]}), 2, "differ"),
        "shorter": (run((TOKENS, {}), (TOKENS[:2], {})), 1, "1 at fault"),
    }
    write_run(known, tmp_path / "a.json")
    for name, (other, code, message) in others.items():
        write_run(other, tmp_path / name)
        files = [str(tmp_path / "a.json"), str(tmp_path / name)]
        result = CliRunner().invoke(app, ["doctor", "compare", *files])
        assert result.exit_code == code, result.output
        assert "".join(message.split()) in "".join(result.output.split())


@pytest.mark.parametrize(
    "arguments",
    [[], ["a.json"], ["a.json", "b.json", "--live", "m"], ["none.json", "none.json"]],
    ids=len,
)
def test_bad_arguments_end_the_command_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["doctor", "compare", *arguments]).exit_code == 2


@pytest.mark.parametrize(("gap", "code", "word"), [(0.1, 0, "tie"), (3.0, 1, "fault")])
def test_the_command_tells_ties_from_faults(
    tmp_path: Path, gap: float, code: int, word: str
) -> None:
    write_run(run((TOKENS, {}), ((5, 6), {1: {6: -1.0, 9: -1.0 - gap}})), tmp_path / "a.json")
    write_run(run((TOKENS, {}), ((5, 9), {1: {9: -1.0, 6: -1.05}})), tmp_path / "b.json")
    files = [str(tmp_path / name) for name in ("a.json", "b.json", "out/report.json")]
    result = CliRunner().invoke(app, ["doctor", "compare", *files[:2], "--json", files[2]])
    assert result.exit_code == code
    assert word in result.output
    report = json.loads(Path(files[2]).read_text())
    assert report["faults"] == code and report["partings"][0] is None
    assert report["partings"][1]["position"] == 1 and report["partings"][1]["verdict"] == word
    assert report["partings"][1]["gaps"] == pytest.approx([gap, 0.05])


def test_an_engine_that_fails_ends_the_command_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineProcessError("the engine failed: [no] model")

    monkeypatch.setattr("medusa_plugin.commands.doctor.OfflineEngine", fail)
    result = CliRunner().invoke(app, ["doctor", "compare", "--live", "model"])
    assert result.exit_code == 2 and "the engine failed: [no] model" in result.output


def test_help_has_examples() -> None:
    result = CliRunner().invoke(app, ["doctor", "compare", "--help"])
    assert result.exit_code == 0 and "medusa doctor compare plain.json medusa.json" in result.output
    assert "compare" in CliRunner().invoke(app, ["doctor", "--help"]).output
