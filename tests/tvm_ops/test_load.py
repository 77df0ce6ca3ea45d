"""Compiling, loading, and the thread pool: each in a process of its own where state matters."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tvm_ops.artifact import PACKAGE, KernelSpec, artifact_path, sealed
from tvm_ops.load import compiler_command, ensure_compiled, kernel, loaded_artifacts, warm_up
from tvm_ops.tree_batch import ITEM_ROWS, KEY_TILE

RUN_BOTH_OPS = """
    import torch
    from tvm_ops import KVCacheGroup, compact_kv, tree_attention, warm_up
    from tvm_ops.testing import error_and_bound, make_case

    def run_both():
        case = make_case(
            layout="vec", dtype=torch.float32, head_dim=64, lens=[9, 30], contexts=[700, 5]
        )
        error, bound = error_and_bound(case, case.run(tree_attention))
        assert error <= bound, (error, bound)
        move()

    def move():
        cache = torch.randn(2, 2, 32, 128)
        before = cache.clone()
        compact_kv(KVCacheGroup([cache], "vec"), torch.tensor([4]), torch.tensor([3]))
        assert not torch.equal(cache, before)
"""


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `script` after the definition of run_both in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN_BOTH_OPS) + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_serving_process_never_imports_tvm():
    script = """
        import sys
        run_both()
        heavy = sorted(set(sys.modules) & {"tvm", "vllm", "medusa_plugin"})
        assert not heavy, heavy
        assert "libtvm_compiler" not in open("/proc/self/maps").read()
    """
    done = python(script)
    assert done.returncode == 0, done.stderr


def test_kernels_share_torchs_threads():
    # A second OpenMP runtime, or a second pool, would add threads.
    script = """
        import os, re
        torch.set_num_threads(3)
        # Enough work that torch has started all its threads.
        torch.randn(4096, 4096).mul(2).sum()
        def state():
            maps = open("/proc/self/maps").read()
            return len(os.listdir("/proc/self/task")), set(re.findall(r"/.*lib[gi]?omp.*", maps))
        warm_up("vec", torch.float32, 64)
        before = state()
        run_both()
        assert state() == before, (before, state())
        assert len(before[1]) == 1, before
        from tvm_ops.openmp import find_openmp
        assert find_openmp().path in before[1]
    """
    done = python(script)
    assert done.returncode == 0, done.stderr


def test_preloaded_openmp_wins():
    # As torch's own calls do, with LD_PRELOAD the kernels must follow the preloaded runtime.
    path = "/lib/x86_64-linux-gnu/libgomp.so.1"
    if not os.path.exists(path):
        pytest.skip("no second OpenMP runtime on this system")
    script = """
        from tvm_ops.openmp import find_openmp
        run_both()
        print(find_openmp().path)
    """
    done = python(script, LD_PRELOAD=path)
    assert done.returncode == 0, done.stderr
    assert os.path.samefile(done.stdout.strip(), path)


def test_missing_kernels_are_compiled_in_a_child_and_logged(tmp_path):
    script = """
        import logging
        logging.basicConfig(level=logging.INFO)
        move()
    """
    done = python(script, MEDUSA_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "compiling launcher:::0, compact_kv:vec:uint32:0" in done.stderr
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "kernels").glob("*.so"))
    assert names == ["compact_kv", "launcher"]
    assert not list((tmp_path / "kernels").glob(".*")), "temporary files were left behind"


@pytest.mark.parametrize(
    "break_it, message",
    [
        ({"PATH": "/nonexistent"}, "no C compiler"),
        ({"MEDUSA_KERNEL_TARGET": "pentium"}, "MEDUSA_KERNEL_TARGET='pentium': expected one of"),
    ],
)
def test_failing_to_compile_is_explained(tmp_path, break_it, message):
    done = python("run_both()", MEDUSA_CACHE=str(tmp_path), **break_it)
    assert done.returncode == 1
    assert message in done.stderr


def test_missing_tvm_is_explained(tmp_path):
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text("raise ImportError('not installed')\n")
    done = subprocess.run(
        [sys.executable, "-m", "tvm_ops.compile", "compact_kv:vec:uint32:0"],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}",
            "MEDUSA_CACHE": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "needs TVM's compiler" in done.stderr


def test_failing_task_raises():
    # A body that fails on any thread must reach the caller as an error, not end the process.
    warm_up("vec", torch.float32, 64)
    launcher = ctypes.CDLL(str(artifact_path(KernelSpec("launcher"))))
    body_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    ran = []

    @body_type
    def body(task, env, closure):
        ran.append(task)
        return -1 if task == 7 else 0

    assert launcher.tvm_ops_parallel_launch(body, None, 20) == -1
    assert 7 in ran
    ran.clear()
    assert launcher.tvm_ops_parallel_launch(body, None, 5) == 0
    assert sorted(ran) == [0, 1, 2, 3, 4]


def test_kernel_refuses_what_the_op_should_have_refused():
    # Behind our own checks tvm-ffi checks tensors again, and raises instead of crashing.
    compact = kernel(KernelSpec("compact_kv", "vec", "uint32"))
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError):
        compact(slots, slots.float(), slots, 1, 16, 16)
    with pytest.raises(ValueError):
        compact(slots, slots, torch.cat([slots, slots]), 1, 16, 16)


def test_warm_up_loads_both_ops():
    warm_up("amx", torch.bfloat16, 64)
    loaded = loaded_artifacts()
    assert KernelSpec("tree_attention", "amx", "bfloat16", 64) in loaded
    assert KernelSpec("compact_kv", "amx", "uint16") in loaded
    with pytest.raises(ValueError, match="unknown KV-cache layout"):
        warm_up("neon", torch.bfloat16, 64)
    with pytest.raises(TypeError, match="holds"):
        warm_up("amx", torch.float32, 64)
    with pytest.raises(ValueError, match="divisible by 16"):
        warm_up("vec", torch.float32, 40)


def test_artifact_names_depend_on_what_they_were_built_from(monkeypatch):
    spec = KernelSpec("tree_attention", "vec", "float32", 64)
    here = artifact_path(spec)
    assert KernelSpec.parse(str(spec)) == spec
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99")
    assert artifact_path(spec) != here, "made by another compiler"
    monkeypatch.undo()
    monkeypatch.setattr("tvm_ops.artifact.source_digest", lambda op, on_gpu: b"changed")
    assert artifact_path(spec) != here, "made of other sources"
    assert artifact_path(KernelSpec("tree_attention", "amx", "float32", 64)) != here
    monkeypatch.setenv("MEDUSA_CACHE", "/elsewhere")
    assert str(artifact_path(spec)).startswith("/elsewhere/kernels/tree_attention-vec-float32-64-")
    with pytest.raises(ValueError, match="not a kernel"):
        KernelSpec.parse("tree_attention:vec")


def test_a_missing_compiler_package_accepts_any_built_version(tmp_path, monkeypatch):
    # Serving hosts need not have apache-tvm when the cache was filled elsewhere.
    from importlib import metadata

    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    spec = KernelSpec("compact_kv", "vec", "uint32")
    built = artifact_path(spec)
    built.parent.mkdir()
    for path in (built, artifact_path(KernelSpec("launcher"))):
        path.write_bytes(sealed(b"a library"))

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert artifact_path(spec) == built
    ensure_compiled([spec])  # nothing to do, so no child process that would fail


def test_work_item_bounds_agree_with_the_kernel():
    # tree_batch.py can't import the kernel's constants without importing TVM.
    assert f"ITEM_ROWS = {ITEM_ROWS} " in (PACKAGE / "kernels" / "merge.py").read_text()
    assert f"KEY_TILE = {KEY_TILE} " in (PACKAGE / "kernels" / "tile_ops.py").read_text()


def test_the_compiler_may_live_in_an_environment_of_its_own(tmp_path, monkeypatch):
    # vLLM's CUDA packages and TVM need different versions of apache-tvm-ffi.
    monkeypatch.setenv("MEDUSA_CACHE", str(tmp_path))
    assert compiler_command()[0] == sys.executable
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=f"python -m venv {tmp_path}/tvm && .*apache-tvm"):
        compiler_command()
    python = tmp_path / "tvm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    command = compiler_command()
    assert command[0] == str(python)
    # PYTHONPATH leads to this process's packages: the compiler must not see them.
    done = subprocess.run(
        [*command[:2], "-c", "import sys; print(sys.flags.isolated)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "1"
