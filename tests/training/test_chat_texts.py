"""A user's conversations: the words are unchanged, and every turn of the assistant is an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_plugin.training.chat_texts import read_conversations, render
from medusa_plugin.training.texts import TrainingError
from tests.training import models

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, you!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "  4  "},
]


def tokenizer_of(folder: Path, template: str) -> Any:
    from transformers import AutoTokenizer

    models.write_tokenizer(folder, template)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "template",
    [
        models.TEMPLATE,
        models.MARKED_TEMPLATE,
        models.MARKED_TEMPLATE.replace("{% generation %}", "{%- generation -%}"),
        models.MARKED_TEMPLATE.replace("{% generation %}", "{%generation%}"),
    ],
)
def test_every_answer_is_marked_to_its_end(template: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    text = render(CHAT, tokenizer)
    assert tokenizer.decode(text.token_ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    answers = [tokenizer.decode(text.token_ids[start:stop]) for start, stop in text.answers]
    assert answers == ["Hello, you!<end>", "  4  <end>"]


def test_turns_may_end_with_another_mark_than_the_eos_token(tmp_path: Path) -> None:
    """As Gemma's do; the new line after it is the template's."""
    tokenizer = tokenizer_of(tmp_path, models.TEMPLATE.replace("<end>", "<|system|>"))
    text = render(CHAT, tokenizer)
    answers = [tokenizer.decode(text.token_ids[start:stop]) for start, stop in text.answers]
    assert answers == ["Hello, you!<|system|>", "  4  <|system|>"]


def test_turns_that_the_template_changes_later_are_not_learnt(tmp_path: Path) -> None:
    """As of templates that drop the thoughts of all turns but the last."""
    changing = models.TEMPLATE.replace(
        "message['content']",
        "(message['content'] if loop.last or message['role'] != 'assistant' else 'cut')",
    )
    tokenizer = tokenizer_of(tmp_path, changing)
    text = render(CHAT, tokenizer)
    answers = [tokenizer.decode(text.token_ids[start:stop]) for start, stop in text.answers]
    assert answers == ["  4  <end>"]


@pytest.mark.parametrize(
    "line", ["{}", "[]", "no", '{"messages": []}', '{"messages": [{"role": "user"}]}']
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, models.TEMPLATE)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n\n" + line + "\n")
    with pytest.raises(TrainingError, match=r"chats.jsonl, line 3.*messages"):
        read_conversations(file, tokenizer)
    file.write_text(json.dumps({"messages": CHAT}) + "\n\n")
    assert len(read_conversations(file, tokenizer)) == 1
