"""Prompt files: both formats, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_plugin.commands.prompts import PromptsError, read_numbered_prompts, read_prompts


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts"
    path.write_text(text, encoding="utf-8")
    return path


def test_one_prompt_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "What is 2+2?\n\n  Grüß Gott \n")
    assert read_prompts(path) == [("What is 2+2?",), ("Grüß Gott",)]


def test_json_lines_with_turns(tmp_path: Path) -> None:
    path = write(tmp_path, '\n{"id": 1, "turns": ["a", "b"]}\n{"turns": ["c"]}\n')
    assert read_prompts(path) == [("a", "b"), ("c",)]
    assert read_numbered_prompts(path) == [(2, ("a", "b")), (3, ("c",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("\n \n", "has no prompts"),
        ('{"turns": ["a"]}\nnot json', "line 2"),
        ('{"turns": ["a"]}\n\n{"turn": ["a"]}', "line 3"),
        ('{"turns": []}', "line 1.*not empty"),
        ('{"turns": "a"}', "line 1"),
        ('{"turns": [1]}', "line 1"),
        ('{"turns": [" "]}', "line 1"),
        ('{"turns": ["a"]}\n{"turns": ' + "[" * 100_000, "line 2"),
        ('{"turns": ["a"], "id": ' + "9" * 10_000 + "}", "line 1"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PromptsError, match=message):
        read_prompts(write(tmp_path, text))


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptsError, match="cannot read"):
        read_prompts(path)
