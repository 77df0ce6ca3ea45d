"""Prompts that the model makes up: where they start, which are of use, and that tries differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from medusa_plugin.training.self_text import reason_against
from medusa_plugin.vllm_glue.recording import NoUserTurnError, sample_prompts


class Tokenizer:
    """Characters are tokens."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        assert self.chat_template is not None
        return self.chat_template.replace("CONTENT", messages[0]["content"])

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]


class Llm:
    """Answers each prompt with the next of `texts`, and keeps what it was asked."""

    def __init__(self, texts: list[tuple[str, str]], template: str | None) -> None:
        self.texts, self.tokenizer = iter(texts), Tokenizer(template)
        self.prompts: list[str] = []
        self.tries: list[list[Any]] = []

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], **_: Any) -> list[Any]:
        self.prompts += ["".join(map(chr, prompt["prompt_token_ids"])) for prompt in prompts]
        self.tries.append(params)
        outputs = []
        for text, reason in (next(self.texts, ("", "stop")) for _ in params):
            completion = SimpleNamespace(
                text=text, finish_reason=reason, token_ids=[ord(c) for c in text]
            )
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs


TEMPLATE = "<s><|user|>\nCONTENT<|end|>\n<|assistant|>\n"


def test_only_prompts_of_use_are_kept() -> None:
    texts = [
        (" What is a ship? ", "stop"),
        ("What is a ship?", "stop"),  # known
        ("Who baked this", "length"),  # unfinished
        ("Go on", "stop"),  # too short
        ("no no no no no no", "stop"),  # a loop
        ("How do ants talk?", "stop"),
        ("Where is the moon?", "stop"),
    ]
    llm, reports = Llm(texts, TEMPLATE), list[int]()
    assert sample_prompts(llm, 3, reports.append) == [
        "What is a ship?",
        "How do ants talk?",
        "Where is the moon?",
    ]
    assert set(llm.prompts) == {"<s><|user|>\n"}
    assert all(params.stop == ["<|end|>"] for params in llm.tries[0])
    assert reports == [1, 3]


@pytest.mark.parametrize("count", [1, 2, 100])
def test_no_try_repeats_another(count: int) -> None:
    llm = Llm([], TEMPLATE)  # nothing is of use: every try is made
    assert sample_prompts(llm, count, None) == []
    seeds = [params.seed for tried in llm.tries for params in tried]
    assert len(llm.tries) == 4 and len(set(seeds)) == len(seeds) > 4 * count


def test_a_further_try_asks_for_what_is_missing() -> None:
    texts = [(f"This is number {i}.", "stop") for i in range(90)] + [("", "stop")] * 36
    llm = Llm([*texts, *((f"And this is {i}.", "stop") for i in range(10))], TEMPLATE)
    assert len(sample_prompts(llm, 100, None)) == 100
    assert [len(tried) for tried in llm.tries] == [126, 13]


def test_no_more_prompts_than_wanted() -> None:
    llm, reports = Llm([(f"Tell me about {i}.", "stop") for i in range(9)], TEMPLATE), list[int]()
    assert len(sample_prompts(llm, 4, reports.append)) == 4 == reports[-1]


@pytest.mark.parametrize("template", [None, "<s>no turns"])
def test_models_without_user_turns_need_prompts(template: str | None) -> None:
    with pytest.raises(NoUserTurnError, match="give prompts with --prompts FILE"):
        sample_prompts(Llm([], template), 2, None)


@pytest.mark.parametrize(
    ("text", "usable"), [("three words here", True), ("two words", False), ("a b " * 6, False)]
)
def test_usable_prompts(text: str, usable: bool) -> None:
    reason = reason_against(text, [ord(character) for character in text])
    assert (reason is None) == usable
