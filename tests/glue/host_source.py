"""What the functions that we change or borrow look like in vLLM's sources, by version.

After vLLM changed one of them and ours was adapted to it:

    python -m tests.glue.host_source                    # for the vLLM installed
    python -m tests.glue.host_source DIR                # for a DIR with vllm/ of another version

writes `host_digests.json` anew for that version. For a version without a wheel for this machine:

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d DIR
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path

from medusa_plugin.vllm_glue.device_hooks import CPU_HOOKS, CUDA_HOOKS
from medusa_plugin.vllm_glue.hooks import (
    REGISTRATION_HOOKS,
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    Hook,
)

HOOKS = REGISTRATION_HOOKS + WORKER_HOOKS + SCHEDULER_HOOKS + CPU_HOOKS + CUDA_HOOKS
DIGESTS = Path(__file__).with_name("host_digests.json")


def installed_source() -> Path:
    """The directory that holds the installed vLLM's package."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent


def version_of(source: Path) -> str:
    """Major and minor version of the vLLM in `source`."""
    text = (source / "vllm" / "_version.py").read_text()
    found = re.search(r"^__version__ = .*['\"](\d+\.\d+)", text, re.MULTILINE)
    assert found is not None, "no version in vllm/_version.py"
    return found[1]


@functools.cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def function_of(source: Path, hook: Hook) -> ast.FunctionDef:
    """The function that `hook` names, in the sources."""
    module = Path(source, *hook.module.split("."))
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    scope: list[ast.stmt] = _module(path).body
    *classes, name = hook.qualname.split(".")
    for outer in classes:
        scope = next(n for n in scope if isinstance(n, ast.ClassDef) and n.name == outer).body
    found = [n for n in scope if isinstance(n, ast.FunctionDef) and n.name == name]
    assert found, f"{hook.name} is gone"
    return found[-1]


def parameters_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """Names of its parameters."""
    arguments = function.args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def digest_of(function: ast.FunctionDef) -> str:
    """Of what it does: comments, docstring and layout do not count."""
    copy = ast.parse(ast.unparse(function)).body[0]
    assert isinstance(copy, ast.FunctionDef)
    if ast.get_docstring(copy, clean=False) is not None:
        copy.body = copy.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(copy).encode()).hexdigest()[:16]


def known_digests() -> dict[str, dict[str, str]]:
    """Version -> name of a function -> digest."""
    loaded: dict[str, dict[str, str]] = json.loads(DIGESTS.read_text())
    return loaded


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else installed_source()
    known = known_digests() if DIGESTS.exists() else {}
    known[version_of(source)] = {hook.name: digest_of(function_of(source, hook)) for hook in HOOKS}
    DIGESTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
