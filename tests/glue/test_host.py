"""The host contract: which versions it takes, and registration that is all or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
from packaging.version import Version

from medusa_plugin.vllm_glue import host
from medusa_plugin.vllm_glue.hooks import Hook


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0rc1", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    host.check_version(Version(version))


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "0.8.5"])
def test_other_versions_are_refused_with_the_remedy(version: str) -> None:
    with pytest.raises(host.UnsupportedHostError, match=r"found vLLM .*>=0\.32,<0\.34.*MEDUSA_DIS"):
        host.check_version(Version(version))


def test_a_moved_function_is_named() -> None:
    hook = Hook("vllm.engine.arg_utils", "EngineArgs.not_there", (), "try it", "", "")
    with pytest.raises(host.UnsupportedHostError, match=r"EngineArgs\.not_there.*to: try it"):
        host.check_hooks([hook])


def test_a_changed_signature_is_named() -> None:
    fake = types.ModuleType("fake")
    fake.function = lambda a, b: None  # type: ignore[attr-defined]
    sys.modules["fake_host"] = fake
    try:
        hook = Hook("fake_host", "function", ("a",), "try it", "", "")
        with pytest.raises(host.UnsupportedHostError, match=r"takes \('a', 'b'\), expected"):
            host.check_hooks([hook])
    finally:
        del sys.modules["fake_host"]


def test_vllm_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DISTRIBUTIONS", ("not-a-distribution",))
    with pytest.raises(host.UnsupportedHostError, match="not installed"):
        host.installed_version()


def run(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    ).stdout.strip()


REPORT = """
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import logits_processor
from vllm.v1.worker import gpu_model_runner
def hooks():
    return [EngineArgs.create_engine_config, EngineArgs.add_cli_args,
            EngineArgs.from_cli_args.__func__, SamplingParams._validate_spec_decode,
            logits_processor.build_logitsprocs, gpu_model_runner.build_logitsprocs,
            SamplingParams.verify]
before = hooks()
import medusa_plugin
from medusa_plugin.vllm_glue import host
ACTION
print("RESULT", sum(a is not b for a, b in zip(before, hooks())))
"""


@pytest.mark.parametrize(
    ("action", "changed"),
    [
        ("medusa_plugin.register()", 7),
        ("import os; os.environ['MEDUSA_DISABLE'] = '1'; medusa_plugin.register()", 0),
        # The last hook to be checked is broken: nothing at all may have been applied.
        (
            "del logits_processor.build_logitsprocs\n"
            "try: medusa_plugin.register(); raise SystemExit('did not raise')\n"
            "except host.UnsupportedHostError: pass\n"
            "logits_processor.build_logitsprocs = before[4]",
            0,
        ),
        (
            "host.MAX_VERSION = host.MIN_VERSION\n"
            "try: medusa_plugin.register(); raise SystemExit('did not raise')\n"
            "except host.UnsupportedHostError: pass",
            0,
        ),
    ],
    ids=["all", "disabled", "broken-hook", "wrong-version"],
)
def test_registration_is_all_or_nothing(action: str, changed: int) -> None:
    output = run(REPORT.replace("ACTION", action), VLLM_PLUGINS="")
    assert output.splitlines()[-1] == f"RESULT {changed}"


def test_registration_is_idempotent() -> None:
    code = (
        "import medusa_plugin\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "medusa_plugin.register(); first = EngineArgs.create_engine_config\n"
        "medusa_plugin.register(); print('RESULT', EngineArgs.create_engine_config is first)"
    )
    assert run(code, VLLM_PLUGINS="").splitlines()[-1] == "RESULT True"


def test_the_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    [entry] = entry_points(group="vllm.general_plugins", name="medusa")
    assert entry.load().__module__ == "medusa_plugin"
