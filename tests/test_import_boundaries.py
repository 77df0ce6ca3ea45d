"""The architecture's directions: who may import what, and what importing us costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("medusa_plugin", "tvm_ops")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ALL_PYTHON = [
    path
    for folder in (*PACKAGES, "tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
]

# Stage -> what it may import of medusa_plugin. A stage knows only earlier ones.
STAGES = {
    "config": set(),
    "embedded": set(),
    "lookup": set(),
    "tree": {"tree"},
    "atomic_file": set(),
    "divergence": {"atomic_file"},
    "heads": {"atomic_file", "heads"},
    "accept": {"tree"},
    "typical": {"tree"},
    "request_options": {"config"},
    "batch": {"request_options", "tree"},
    "compact": {"accept"},
    "branches": {"lookup", "tree"},
    "growth": {"heads", "tree"},
    "static_nodes": {"growth", "tree"},
    "draft": {"accept", "batch", "branches", "growth", "heads", "static_nodes", "tree"},
    "step": {"accept", "batch", "compact", "draft", "tree", "typical"},
}


def imports(path: Path) -> Iterator[str]:
    """Full names of everything that `path` imports, at any depth of the code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(name: str) -> str:
    return name.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_glue_imports_vllm(path: Path) -> None:
    if "vllm_glue" not in path.parts:
        assert "vllm" not in {top(name) for name in imports(path)}


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if "tvm_ops" in p.parts], ids=lambda p: str(p.relative_to(ROOT))
)
def test_tvm_ops_stands_alone(path: Path) -> None:
    names = {top(name) for name in imports(path)}
    assert "medusa_plugin" not in names
    if path.name != "compile.py" and path.parent.name != "kernels":
        assert "tvm" not in names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_tvm_ops_imports_tvm(path: Path) -> None:
    if "tvm_ops" not in path.parts:
        assert not {"tvm", "tvm_ffi"} & {top(name) for name in imports(path)}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_depend_one_way(stage: str) -> None:
    folder = ROOT / "medusa_plugin" / stage
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert files
    for path in files:
        used = {name.split(".")[1] for name in imports(path) if top(name) == "medusa_plugin"}
        assert used <= STAGES[stage], f"{path.relative_to(ROOT)} imports {used - STAGES[stage]}"


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys, medusa_plugin, medusa_plugin.embedded, medusa_plugin.commands.main\n"
        "heavy = {'torch', 'vllm', 'tvm', 'tvm_ffi', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", ALL_PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_long_files_and_no_utils(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in {"utils", "util", "helpers", "misc", "common"}
