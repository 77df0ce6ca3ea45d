"""The kernel cache: what is used, what is refused or rebuilt, and what a warm start costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tvm_ops.artifact import PACKAGE, KernelSpec, artifact_path, cache_dir, is_intact, sealed
from tvm_ops.load import attention_spec, compact_spec, ensure_compiled
from tvm_ops.targets import TARGETS

COMPACT = KernelSpec("compact_kv", "vec", "uint32")
LAUNCHER = KernelSpec("launcher")
MOVE = """
    import logging, sys, time
    logging.basicConfig(level=logging.INFO)
    import torch
    import tvm_ops.load
    from tvm_ops import KVCacheGroup, compact_kv

    def move():
        cache = torch.arange(2 * 2 * 32 * 128.0).view(2, 2, 32, 128)
        before = cache.clone()
        compact_kv(KVCacheGroup([cache], "vec"), torch.tensor([4]), torch.tensor([3]))
        # Keys [head_dim][token], then values [token][head_dim], of each head.
        keys, was = (c.view(2, 2, 128, 32)[0, :, :64] for c in (cache, before))
        assert torch.equal(keys[..., 3], was[..., 4])
        assert torch.equal(keys[..., 4:], was[..., 4:])
"""


def start(script: str, cache: Path, **options) -> subprocess.Popen[str]:
    """Run `script` after MOVE in a fresh interpreter that uses `cache`."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "MEDUSA_CACHE": str(cache)}
    environment |= options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MOVE) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def run(script: str, cache: Path, **options) -> tuple[str, str]:
    """stdout and stderr of a script that must succeed."""
    process = start(script, cache, **options)
    out, messages = process.communicate()
    assert process.returncode == 0, messages
    return out, messages


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A cache with the launcher and one compaction kernel, as they are in the user's."""
    ensure_compiled([COMPACT])
    kernels = tmp_path / "cache" / "kernels"
    kernels.mkdir(parents=True)
    for spec in (COMPACT, LAUNCHER):
        shutil.copy(artifact_path(spec), kernels)
    monkeypatch.setenv("MEDUSA_CACHE", str(kernels.parent))
    return kernels.parent


def test_warm_start_is_quick_and_imports_no_compiler():
    ensure_compiled([attention_spec("vec", torch.float32, 64), compact_spec("vec", torch.float32)])
    script = """
        from tvm_ops import warm_up
        warm_up  # the import of torch and of our own modules is not what is measured
        begin = time.perf_counter()
        warm_up("vec", torch.float32, 64)
        print(time.perf_counter() - begin)
        assert "tvm" not in sys.modules
        assert "libtvm_compiler" not in open("/proc/self/maps").read()
    """
    out, messages = run(script, cache_dir().parent)
    seconds = float(out)
    print(f"warm start: {seconds:.3f} s")
    assert "compiling" not in messages
    assert seconds < 5, "reported, not measured: the machine may be busy"


def test_other_artefacts_are_not_used(cache, monkeypatch):
    # A cache may be shared by machines, versions and models.
    assert is_intact(artifact_path(COMPACT))
    for target in TARGETS.values():
        path = artifact_path(COMPACT, target)
        assert not path.exists() or path == artifact_path(COMPACT)
    assert not artifact_path(KernelSpec("compact_kv", "amx", "uint16")).exists()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.28.0")
    assert not artifact_path(COMPACT).exists()
    monkeypatch.undo()
    monkeypatch.setenv("MEDUSA_CACHE", str(cache))
    monkeypatch.setattr("tvm_ops.artifact.source_digest", lambda op, on_gpu: b"edited")
    assert not artifact_path(COMPACT).exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_damaged_libraries_are_compiled_again(cache, damage):
    # To map a library that was cut short kills the process.
    path = artifact_path(LAUNCHER)
    content = path.read_bytes()
    broken = {
        "cut": content[: len(content) // 2],
        "changed": content[:600] + bytes([content[600] ^ 1]) + content[601:],
        "empty": b"",
        "foreign": content[:-32],  # a library without the hash that closes our files
    }[damage]
    path.write_bytes(broken)
    assert not is_intact(path)
    _, messages = run("move()", cache)
    assert f"{path} is damaged: compiling it again" in messages
    assert is_intact(path)


def test_a_damaged_library_that_cannot_be_compiled_is_an_error(cache):
    path = artifact_path(COMPACT)
    path.write_bytes(path.read_bytes()[:-1])
    process = start("move()", cache, env={"PATH": "/nonexistent"})
    _, messages = process.communicate()
    assert process.returncode == 1
    assert f"{path} is damaged" in messages
    assert "RuntimeError: compiling compact_kv:vec:uint32:0 failed" in messages
    assert "no C compiler" in messages


def test_processes_that_compile_at_once_do_not_clash(tmp_path):
    processes = [start("move()", tmp_path) for _ in range(3)]
    for process in processes:
        _, messages = process.communicate()
        assert process.returncode == 0, messages
    files = sorted(path.name for path in (tmp_path / "kernels").iterdir())
    assert [re.sub("-.*", "", f) for f in files if f.endswith(".so")] == ["compact_kv", "launcher"]
    assert all(f.endswith((".so", ".lock")) for f in files), "temporary files were left behind"


def test_only_one_of_them_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "tvm_ops.compile", str(LAUNCHER)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]
    results = [process.communicate() for process in processes]
    assert {out.strip() for out, _ in results} == {str(artifact_path(LAUNCHER))}
    assert sum("compiled launcher" in messages for _, messages in results) == 1


def test_a_background_compilation_is_waited_for(tmp_path):
    script = """
        from tvm_ops import load
        load._start([load._LAUNCHER, load.compact_spec("vec", torch.float32)])
        children = set(load._children.values())
        move()
        print(len(children), len(load._children))
    """
    out, messages = run(script, tmp_path)
    assert messages.count("compiling") == 1, "compiled twice"
    assert out.split() == ["1", "0"]


def test_what_fails_in_the_background_is_raised_later(tmp_path):
    script = """
        from tvm_ops import start_warm_up, warm_up
        start_warm_up("vec", torch.float32, 64)
        print("started")
        warm_up("vec", torch.float32, 64)
    """
    process = start(script, tmp_path, env={"PATH": "/nonexistent"})
    out, messages = process.communicate()
    assert (process.returncode, out.strip()) == (1, "started")
    assert "no C compiler" in messages


def assert_explains(cache: Path, **options) -> None:
    process = start("move()", cache, **options)
    _, messages = process.communicate()
    assert process.returncode == 1
    assert f"the kernel cache {cache}/kernels can't be written" in messages
    assert "set MEDUSA_CACHE to a directory that is" in messages


def test_a_cache_that_cannot_be_a_directory_is_explained(tmp_path):
    (tmp_path / "kernels").touch()
    assert_explains(tmp_path)


def mounted(directory: Path, options: str) -> None:
    """Make `directory` a small file system of its own, or skip."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")


def test_a_full_cache_is_explained(tmp_path):
    mounted(tmp_path, "size=8k")
    try:
        assert_explains(tmp_path)
        assert not list((tmp_path / "kernels").glob("*.so")), "a partial file was left behind"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_read_only_cache_serves_and_is_explained(cache):
    directory = cache / "kernels"
    content = {path.name: path.read_bytes() for path in directory.iterdir()}
    mounted(cache, "size=1m")
    try:
        directory.mkdir()
        for name, data in content.items():
            (directory / name).write_bytes(data)
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        run("move()", cache)  # warm: nothing is written
        process = start("tvm_ops.load.warm_up('vec', torch.bfloat16, 64)", cache)
        _, messages = process.communicate()
        assert process.returncode == 1
        assert f"the kernel cache {directory} can't be written" in messages
    finally:
        subprocess.run(["umount", str(cache)], check=True)


def test_the_reference_runs_only_when_asked_for(cache):
    script = """
        move()
        move()
        print(len(tvm_ops.load.loaded_artifacts()), tvm_ops.load.reference_requested())
    """
    out, messages = run(script, cache)
    assert out.split() == ["1", "False"]
    out, messages = run(script, cache, env={"MEDUSA_KERNEL_TARGET": "reference"})
    assert out.split() == ["0", "True"]
    assert messages.count("the plain torch twins run instead") == 1


def test_a_missing_file_and_an_empty_one_are_not_intact(tmp_path):
    path = tmp_path / "library.so"
    assert not is_intact(path)
    path.write_bytes(sealed(b""))
    assert not is_intact(path)
    path.write_bytes(sealed(b"code"))
    assert is_intact(path)
