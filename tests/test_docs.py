"""The examples of the documentation run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = [
    pytest.param(block, id=f"{path.name}-{i}")
    for path in sorted(DOCS.glob("*.md"))
    for i, block in enumerate(_BLOCK.findall(path.read_text()))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs_without_vllm_and_medusa_plugin(code: str) -> None:
    check = """
import sys
assert not {"vllm", "medusa_plugin", "tvm"} & set(sys.modules)
assert out.isfinite().all()
moved = read_rows(caches[1], "vec", slots[context + 1 : context + 3])[0]
assert torch.equal(moved, keys[context + accepted])
"""
    script = "from tvm_ops.layouts import read_rows\n" + code + check
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_named_tests_exist() -> None:
    """Of docs/public-reports.md, which says by which test something holds."""
    named = re.findall(r"`((?:\w+/)*\w+\.py)::(\w+)`", (DOCS / "public-reports.md").read_text())
    assert len(named) > 60
    for path, function in named:
        file = Path(__file__).parent / path
        assert file.is_file(), path
        assert f"def {function}(" in file.read_text(), f"{path}::{function}"


def test_there_is_an_example() -> None:
    assert EXAMPLES
