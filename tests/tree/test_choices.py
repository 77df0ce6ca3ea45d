"""A static tree is read the same in every spelling; what is none is refused, saying what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_plugin.tree.choices import MAX_TEXT_LENGTH, parse_choices
from medusa_plugin.tree.static import choose_tree
from medusa_plugin.tree.token_tree import TokenTree, TreeError

PATHS = [(0,), (1,), (0, 0), (1, 2), (0, 0, 3)]
LISTS = [list(path) for path in PATHS]
TUPLES_TEXT = "[(0,), (1,), (0, 0), (1, 2), (0, 0, 3)]"  # FasterDecoding, EAGLE, older vLLM
BRACES = "{0}, {1}, {0, 0}, {1, 2}, {0, 0, 3}"  # TensorRT-LLM's Triton backend

SPELLINGS = {
    "lists": LISTS,
    "tuples": PATHS,
    "tuple of tuples": tuple(PATHS),
    "JSON text": json.dumps(LISTS),
    "JSON text over lines": "\n " + json.dumps(LISTS, indent=2),
    "Python text": TUPLES_TEXT,
    "Python text without brackets": TUPLES_TEXT[1:-1],
    "Python text over lines": "\n  [(0,),\n  [1],  # a comment\n  (0, 0), (1, 2), (0, 0, 3),\n]",
    "braces": BRACES,
    "object": {"medusa_choices": LISTS, "medusa_num_heads": 3},
    "heads' config": json.dumps({"medusa_num_heads": 3, "medusa_choices": LISTS}),
    "object with text": json.dumps({"speculative_token_tree": TUPLES_TEXT}),
    "object with braces": json.dumps({"medusa_choices": BRACES}),
    "Python object": f"{{'medusa_choices': {TUPLES_TEXT}}}",
    "TensorRT-LLM decoding config": json.dumps(
        {"decoding_type": "Medusa", "medusa_choices": LISTS, "num_medusa_heads": 3}
    ),
    "TensorRT-LLM options": json.dumps(
        {"max_batch_size": 1, "speculative_config": {"medusa_choices": LISTS}}
    ),
    "RTP-LLM config": json.dumps(
        {
            "model_type": "qwen",
            "medusa_config": {"medusa_num_heads": 3, "medusa_choices": LISTS, "top_k": 10},
        }
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_spelling_means_the_same_tree(spelling: object) -> None:
    assert parse_choices(spelling) == PATHS


@pytest.mark.parametrize(
    "text", [text for text in SPELLINGS.values() if isinstance(text, str)], ids=str
)
def test_every_text_may_be_in_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tree [1].json"
    file.write_text(text, encoding="utf-8")
    assert parse_choices(str(file)) == PATHS
    file.write_text(text, encoding="utf-8-sig")  # as Windows editors write it
    assert parse_choices(str(file)) == PATHS


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5).map(tuple)))
def test_lists_survive_their_json_and_python_text(paths: list[tuple[int, ...]]) -> None:
    assert parse_choices(json.dumps(paths)) == paths
    assert parse_choices(repr(paths)) == paths


def test_the_spelling_in_braces_implies_the_parents() -> None:
    # The example of TensorRT-LLM's documentation.
    assert set(parse_choices("{0, 0, 0}, {0, 1}")) == {(0,), (0, 0), (0, 0, 0), (0, 1)}
    tree = choose_tree("{0, 0, 0}, {0, 1}", num_heads=3, num_nodes=15, accuracies=None)
    assert tree == TokenTree.from_choices([(0,), (0, 0), (0, 1), (0, 0, 0)])


def test_a_list_of_lists_does_not() -> None:
    for spelling in ([[0, 0, 0], [0, 1]], "[[0, 0, 0], [0, 1]]", {"medusa_choices": [[0, 1]]}):
        with pytest.raises(TreeError, match=r"path \[0,.*\] has no parent \[0.*list that path too"):
            choose_tree(spelling, num_heads=3, num_nodes=15, accuracies=None)  # type: ignore[arg-type]


def test_a_negative_rank_is_read_as_one_in_every_spelling() -> None:
    for spelling in ([[-1]], "[[-1]]", "[(-1,)]", "{-1}"):
        with pytest.raises(TreeError, match=r"path \[-1\] has a rank outside 0..63"):
            choose_tree(spelling, num_heads=3, num_nodes=15, accuracies=None)


REFUSED = [
    ("", "the tree is an empty text: give a list of paths, e.g. "),
    ("  \n", "the tree is an empty text"),
    ("[[0], [1", r"the tree is neither JSON nor a list.* got '\[\[0\], \[1'"),
    ("[(0,), (1,", "the tree is neither JSON nor a list in Python's spelling.*never closed"),
    ("[(0,), f(1)]", "the tree is neither JSON nor"),
    ("{0, 0}, {1", "the tree is neither JSON nor.*e.g. {0, 0}, {1}"),
    ("{0, a}", "the tree is neither JSON nor.*e.g. {0, 0}, {1}"),
    ("{0: [0]}", "the tree is neither JSON nor"),
    ("{[0]: [0]}", "the tree is neither JSON nor"),
    ("/no/such/tree.json", "tree file /no/such/tree.json cannot be read.*'dynamic', 'static'"),
    ("/", "tree file / cannot be read"),
    ("a\0b", "cannot be read"),
    ("x" * 5000, "tree file x{300} cannot be read"),
    (7, "the tree is not a list of paths, e.g. .*; got 7"),
    (None, "got None"),
    ("[0]", "path 0 of the tree is not a list of integers"),
    ([1, 1, 1, 1], "path 1 of the tree is not a list of integers, e.g. "),
    ([[0], 3], "path 3 of the tree is not a list of integers"),
    ([[0], [0, 1.5]], r"path \[0, 1.5\] of the tree is not a list of integers"),
    ([[0], ["1"]], r"path \['1'\] of the tree is not"),
    ([[True]], r"path \[True\] of the tree is not"),
    ("[[true]]", r"path \[True\] of the tree is not"),
    ("[[[0]]]", r"path \[\[0\]\] of the tree is not"),
    ("[{}]", "path {} of the tree is not"),
    ([[0] * 64], r"path \[0, 0, .*\] of the tree is 64 deep, at most 63 fit"),
    ({"tree": [[0]]}, r"exactly one of the keys medusa_choices, .*; got \['tree'\]"),
    ("{}", "exactly one of the keys medusa_choices.*got "),
    ({"medusa_choices": [[0]], "medusa_config": {}}, "expected exactly one"),
    ({"medusa_choices": None}, "'medusa_choices' of the tree is not a list of paths.*got None"),
    ({"medusa_choices": {}}, "'medusa_choices' of the tree is not a list of paths.*got {}"),
    ({"medusa_choices": "tree.json"}, "'medusa_choices' of the tree is neither JSON nor"),
    ({"medusa_choices": '{"medusa_choices": 1}'}, "'medusa_choices' of the tree"),
    ({"medusa_config": [[0]]}, r"'medusa_config' of the tree is not an object; got \[\[0\]\]"),
    (
        {"medusa_config": {"medusa_num_heads": 4}},
        "'medusa_config' of the tree is an object: expected exactly one of the keys medusa_choices",
    ),
    ({"medusa_config": {"medusa_config": {"medusa_choices": [[0]]}}}, "expected exactly one"),
]


@pytest.mark.parametrize(("choices", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_is_no_list_of_paths_is_refused(choices: object, message: str) -> None:
    with pytest.raises(TreeError, match=message) as caught:
        parse_choices(choices)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        "{" * 100_000,
        '{"medusa_config":' * 50_000,
        "(" * 5_000 + ")" * 5_000,
        "[" + "-" * 100_000 + "1]",
        "[(0,)" + "+1" * 100_000 + "]",
        "{0, " * 100_000,
        "[" + "9" * 5_000 + "]",
        "[[0], " + "[0], " * 300_000 + "[0]]",
        "{" + "0, " * 300_000 + "0}",
        "{" + "}, {".join("0, 1, 2" for _ in range(80_000)) + "}",
    ],
    ids=lambda text: f"{text[:12]}... {len(text)}",
)
def test_huge_and_deep_texts_are_refused_briefly(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tree"
    file.write_text(text)
    for spelling in (text, str(file)):
        with pytest.raises(TreeError) as caught:
            choose_tree(spelling, num_heads=4, num_nodes=15, accuracies=None)
        assert len(str(caught.value)) < 1000


def test_no_more_of_a_file_is_read_than_a_tree_can_need() -> None:
    with pytest.raises(TreeError, match=f"more than {MAX_TEXT_LENGTH} characters"):
        parse_choices("/dev/zero")


def test_the_limit_is_far_above_the_largest_tree() -> None:
    longest = [[63] * 63] * 63
    assert len(json.dumps(longest, indent=4)) < MAX_TEXT_LENGTH / 5


def test_a_file_is_named_in_what_is_said_about_its_content(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    for content, message in [
        ("not a tree", "is neither JSON nor"),
        ("[0]", "path 0 of tree file"),
        ('{"a": 1}', "is an object: expected exactly one"),
    ]:
        file.write_text(content)
        with pytest.raises(TreeError, match=message) as caught:
            parse_choices(str(file))
        assert f"tree file {file}" in str(caught.value)


def test_text_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for text in (f"[open({str(mark)!r}, 'w')]", f"[(__import__('os').mkdir({str(mark)!r}),)]"):
        with pytest.raises(TreeError):
            parse_choices(text)
    assert not mark.exists()
