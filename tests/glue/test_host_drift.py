"""vLLM's functions that we change or borrow: signatures, what they do, and whether all are listed.

A digest that differs means that vLLM changed what a function does under the same signature: read
the change, adapt ours, then renew the digest (`host_source`). It is no reason to refuse a start.
"""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path

import pytest

from medusa_plugin.vllm_glue import host
from medusa_plugin.vllm_glue.hooks import Hook
from tests.glue import host_source
from tests.glue.host_source import HOOKS

OURS = [
    "model_runner.MedusaModelRunner",
    "worker.MedusaCPUModelRunner",
    "worker.MedusaCPUWorker",
    "worker_cuda.MedusaCUDAModelRunner",
    "worker_cuda.MedusaCUDAWorker",
    "scheduler.MedusaScheduler",
    "attention.TreeAttentionMetadataBuilder",
    "attention.TreeAttentionImpl",
    "attention_cuda.TreeFlashAttentionMetadataBuilder",
    "attention_cuda.TreeFlashAttentionImpl",
]
# Constructors pass everything on.
NOT_HOOKS = {"__init__"}


def sources() -> list[Path]:
    """The installed vLLM, and that of MEDUSA_VLLM_SOURCE=<dir with vllm/>, if it is set."""
    other = os.environ.get("MEDUSA_VLLM_SOURCE")
    return [host_source.installed_source(), *([Path(other)] if other else [])]


@pytest.fixture(params=["installed", "other"], scope="module")
def source(request: pytest.FixtureRequest) -> Path:
    found = sources()
    if request.param == "other" and len(found) == 1:
        pytest.skip("MEDUSA_VLLM_SOURCE is not set")
    return found[0] if request.param == "installed" else found[1]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.qualname)
def test_signatures_at_run_time(hook: Hook) -> None:
    host.check_hooks([hook])


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.qualname)
def test_functions_take_and_do_what_is_known(hook: Hook, source: Path) -> None:
    function = host_source.function_of(source, hook)
    assert host_source.parameters_of(function) == hook.parameters
    version = host_source.version_of(source)
    known = host_source.known_digests()[version][hook.name]
    assert host_source.digest_of(function) == known, (
        f"{hook.name} of vLLM {version} does something else than when ours was written. Ours: "
        f"{hook.difference} (to: {hook.reason})"
    )


def test_every_supported_version_is_known() -> None:
    known = host_source.known_digests()
    assert set(known) == {"0.32", "0.33"}
    for version, digests in known.items():
        assert host.MIN_VERSION <= host.Version(version) < host.MAX_VERSION
        assert set(digests) == {hook.name for hook in HOOKS}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.qualname)
def test_every_hook_says_why_how_and_how_long(hook: Hook) -> None:
    for text in (hook.reason, hook.difference, hook.removal):
        assert len(text) > 8 and not text.endswith(".")


def test_no_hook_is_listed_twice() -> None:
    assert len({hook.name for hook in HOOKS}) == len(HOOKS)


@pytest.mark.parametrize("name", OURS)
def test_every_override_is_listed(name: str) -> None:
    module, _, class_name = name.partition(".")
    ours = getattr(importlib.import_module(f"medusa_plugin.vllm_glue.{module}"), class_name)
    listed = {(hook.module, hook.qualname) for hook in HOOKS}
    for base in ours.__mro__:
        if not base.__module__.startswith("medusa_plugin"):
            continue
        for method, value in vars(base).items():
            if method in NOT_HOOKS or not inspect.isroutine(getattr(value, "__func__", value)):
                continue
            theirs = [
                (cls.__module__, f"{cls.__name__}.{method}")
                for cls in ours.__mro__
                if cls.__module__.startswith("vllm.") and method in vars(cls)
            ]
            assert not theirs or listed & set(theirs), f"{name} overrides {theirs[0]}, unlisted"


def test_a_change_is_noticed_and_a_comment_is_not() -> None:
    import ast

    def digest(text: str) -> str:
        function = ast.parse(text).body[0]
        assert isinstance(function, ast.FunctionDef)
        return host_source.digest_of(function)

    known = digest("def f(a):\n    return a + 1")
    assert digest('def f(a):\n    """Says."""\n    # why\n    return (a\n        + 1)') == known
    assert digest("def f(a):\n    return a + 2") != known
    assert digest("def f(a=0):\n    return a + 1") != known
    assert digest("@g\ndef f(a):\n    return a + 1") != known
