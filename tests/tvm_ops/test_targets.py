"""The table of targets, and kernels of other targets than this machine's best: run, not just built.

Narrower x86-64 levels run here in a child process, ARM kernels under qemu's user emulation through
kernel_driver.c.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tvm_ops.c_call import CDriver, RecordedCall, compile_driver
from tvm_ops import KVCacheGroup, compact_kv, tree_attention
from tvm_ops.amx import _request, amx_permitted
from tvm_ops.artifact import PACKAGE, KernelSpec, artifact_path
from tvm_ops.layouts import find_layout
from tvm_ops.load import _Child, attention_spec, compact_spec, ensure_compiled
from tvm_ops.reference import compact_kv_reference
from tvm_ops.targets import TARGETS, best_target, cpu_flags, host_target, machine
from tvm_ops.testing import AttentionCase, error_and_bound, make_case, tree_rows

V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
V3 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
AMX = {"amx_tile", "amx_bf16"}
ARM_SYSROOT = Path("/usr/aarch64-linux-gnu")

# The kernels that are run for each target: a layout and element type each, small head_dims, since
# compiling is what these tests cost.
VARIANTS = {
    "x86-64-v3": [
        ("vec", torch.float32, 16),
        ("vec", torch.bfloat16, 32),
        ("amx", torch.bfloat16, 32),
    ],
    "x86-64": [("vec", torch.float32, 16), ("vec", torch.float16, 16)],
    "aarch64": [
        ("vec", torch.float32, 16),
        ("vec", torch.bfloat16, 32),
        ("vec", torch.float16, 16),
        ("amx", torch.bfloat16, 32),
    ],
}


def specs_of(target: str) -> list[KernelSpec]:
    attention = [attention_spec(*variant) for variant in VARIANTS[target]]
    compaction = {compact_spec(layout, dtype) for layout, dtype, _ in VARIANTS[target]}
    return [KernelSpec("launcher"), *attention, *sorted(compaction, key=str)]


def needs_arm_tools() -> None:
    for program, package in (
        ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
        ("qemu-aarch64", "qemu-user"),
    ):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} (Debian: apt-get install {package})")


@pytest.fixture(scope="session")
def compilers() -> dict[str, subprocess.Popen[str]]:
    """A process per target that compiles its kernels into the kernel cache, all at once."""
    command = [sys.executable, "-m", "tvm_ops.compile", "--target"]
    return {
        target: subprocess.Popen(
            [*command, target, *map(str, specs_of(target))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for target in VARIANTS
        if shutil.which(TARGETS[target].compilers[0])
    }


@pytest.fixture(scope="session")
def compiled_for(request: pytest.FixtureRequest, compilers) -> str:
    """The target of this parameter, its kernels compiled."""
    target = request.param
    if target == "aarch64":
        needs_arm_tools()
    elif machine() != "x86_64":
        pytest.skip(f"{target} kernels can't run on {machine()}")
    compiler = compilers[target]
    if compiler.returncode is None:
        _, messages = compiler.communicate()
        assert compiler.returncode == 0, messages
    assert compiler.returncode == 0, "see the first test of this target"
    return target


def attention_cases(layout: str, dtype: torch.dtype, head_dim: int) -> list[AttentionCase]:
    """Ragged trees over split and unsplit keys; soft-cap with a window; more than 64 rows."""
    size = {"layout": layout, "dtype": dtype, "head_dim": head_dim}
    ragged = make_case(lens=[1, 5, 64, 17], contexts=[0, 100, 300, 63], **size)
    capped = make_case(lens=[9, 70], contexts=[130, 31], group=1, seed=1, **size)
    options = {"softcap": 5.0, "sliding_window": 40}
    return [ragged, AttentionCase(**{**vars(capped), **options})]


def check_attention(case: AttentionCase, out: torch.Tensor) -> None:
    error, bound = error_and_bound(case, out)
    assert error <= bound  # false for NaN as well
    assert out[~tree_rows(case.batch, len(out))].isnan().all(), "rows outside trees were written"


def compaction_case(layout: str, dtype: torch.dtype) -> tuple[KVCacheGroup, torch.Tensor, ...]:
    """Two layers, and moves that read what earlier ones wrote, across a block border."""
    caches = [torch.randn(3, 2, 32, 2 * 48).to(dtype) for _ in range(2)]
    return KVCacheGroup(caches, layout), torch.tensor([5, 6, 70, 33]), torch.tensor([6, 7, 5, 31])


def check_compaction(layout: str, dtype: torch.dtype, run) -> None:
    group, source, target = compaction_case(layout, dtype)
    expected = [cache.clone() for cache in group.caches]
    compact_kv_reference(expected, layout, source, target)
    assert not torch.equal(expected[0], group.caches[0])
    run(group, source, target)
    for cache, other in zip(group.caches, expected, strict=True):
        assert torch.equal(cache, other)


def test_detection():
    assert best_target("x86_64", AMX | V4 | V3).name == "sapphirerapids"
    assert best_target("x86_64", AMX | V4 | V3, amx=False).name == "x86-64-v4"
    assert best_target("x86_64", {"amx_tile"} | V4 | V3).name == "x86-64-v4"
    assert best_target("x86_64", V4 | V3).name == "x86-64-v4"
    assert best_target("AMD64", V3 | {"avx512f"}).name == "x86-64-v3"
    assert best_target("x86_64", {"sse2"}).name == "x86-64"
    assert best_target("aarch64", ()).llvm["mtriple"] == "aarch64-linux-gnu"
    with pytest.raises(ValueError, match="no kernels for machine 'sparc': expected one of"):
        best_target("sparc", ())


def test_a_forced_target_must_run_here(monkeypatch):
    # An instruction that the processor lacks would end the process without a word.
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("tvm_ops.targets.cpu_flags", lambda: frozenset(V3))
    assert host_target().name == "x86-64-v3"
    for name, message in {
        "x86-64-v4": "this processor lacks avx512bw, ",
        "aarch64": "this machine is x86_64",
        "pentium": "expected one of sapphirerapids, ",
    }.items():
        monkeypatch.setenv("MEDUSA_KERNEL_TARGET", name)
        with pytest.raises(ValueError, match=message):
            host_target()
    monkeypatch.setenv("MEDUSA_KERNEL_TARGET", "x86-64")
    assert host_target().name == "x86-64"


@pytest.fixture
def sapphire_rapids(monkeypatch) -> list[int]:
    """A machine with AMX; Linux's answers to the next requests to use it."""
    answers: list[int] = []
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("tvm_ops.targets.cpu_flags", lambda: frozenset(AMX | V4 | V3))
    monkeypatch.setattr("tvm_ops.amx._request", lambda: answers.pop(0))
    amx_permitted.cache_clear()
    yield answers
    amx_permitted.cache_clear()


def test_amx_is_asked_for_once(sapphire_rapids, monkeypatch):
    sapphire_rapids.append(0)
    assert [host_target().name for _ in range(3)] == ["sapphirerapids"] * 3
    assert not sapphire_rapids
    monkeypatch.setenv("MEDUSA_KERNEL_TARGET", "sapphirerapids")
    assert host_target().name == "sapphirerapids"


def test_refused_amx_is_done_without_and_logged_once(sapphire_rapids, monkeypatch, caplog):
    # As in containers and virtual machines that show the flag.
    sapphire_rapids.append(errno.EOPNOTSUPP)
    assert [host_target().name for _ in range(3)] == ["x86-64-v4"] * 3
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "Linux does not let this process use it (Operation not supported)" in record.message
    monkeypatch.setenv("MEDUSA_KERNEL_TARGET", "sapphirerapids")
    with pytest.raises(ValueError, match="Linux does not let this process use AMX"):
        host_target()
    assert len(caplog.records) == 1


def test_amx_is_not_asked_for_where_it_is_not_wanted(sapphire_rapids, monkeypatch):
    monkeypatch.setenv("MEDUSA_KERNEL_TARGET", "x86-64-v4")
    assert host_target().name == "x86-64-v4"  # no answer is left to give
    monkeypatch.delenv("MEDUSA_KERNEL_TARGET")
    monkeypatch.setattr("tvm_ops.targets.cpu_flags", lambda: frozenset(V4 | V3))
    assert host_target().name == "x86-64-v4"


@pytest.mark.skipif(machine() != "x86_64" or cpu_flags() >= AMX, reason="needs x86 without AMX")
def test_a_machine_without_amx_refuses_it():
    # The request itself, as Linux hears it.
    assert _request() in (errno.EINVAL, errno.EOPNOTSUPP)


def test_a_child_compiles_for_the_target_of_its_parent(sapphire_rapids, monkeypatch):
    # It might be granted AMX where the parent was not, and write a file nobody looks for.
    sapphire_rapids.append(errno.ENOSPC)
    started = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: started.append(command))
    _Child([KernelSpec("launcher")])
    assert started[0][-3:] == ["--target", "x86-64-v4", "launcher:::0"]


def test_aarch64_is_detected(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("tvm_ops.targets.cpu_flags", frozenset)
    assert host_target().name == "aarch64"
    assert host_target().compilers == ("gcc", "cc")
    assert TARGETS["x86-64"].compilers == ("x86_64-linux-gnu-gcc",)


def test_each_target_has_artefacts_of_its_own():
    spec = KernelSpec("tree_attention", "vec", "float32", 64)
    assert len({artifact_path(spec, target) for target in TARGETS.values()}) == len(TARGETS)


def run_variants(target: str) -> None:
    """Check all kernels of a target in this process, which has to run that target."""
    assert host_target().name == target
    for layout, dtype, head_dim in VARIANTS[target]:
        for case in attention_cases(layout, dtype, head_dim):
            check_attention(case, case.run(tree_attention))
        check_compaction(layout, dtype, compact_kv)


@pytest.mark.parametrize("compiled_for", ["x86-64-v3", "x86-64"], indirect=True)
def test_narrow_x86_kernels_are_right(compiled_for):
    script = f"from tests.tvm_ops.test_targets import run_variants; run_variants({compiled_for!r})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MEDUSA_KERNEL_TARGET": compiled_for, "OMP_NUM_THREADS": "2"},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def disassembly(path: Path) -> str:
    if shutil.which("objdump") is None:
        pytest.skip("no objdump (Debian: apt-get install binutils)")
    command = ["objdump", "-d", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "compiled_for, used, forbidden",
    [
        # zmm: AVX-512 vectors; k0 to k7: its masks; ymm: AVX; v...: AVX's encoding.
        ("x86-64-v3", r"vfmadd\w+ .*%ymm", r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])"),
        ("x86-64", r"mulps .*%xmm", r"%zmm|%ymm|%k[0-7]\b|\tv[a-z]\w+ "),
    ],
    indirect=["compiled_for"],
)
def test_no_instructions_beyond_the_target(compiled_for, used, forbidden):
    for spec in specs_of(compiled_for):
        code = disassembly(artifact_path(spec, TARGETS[compiled_for]))
        assert (spec.op != "tree_attention") or re.search(used, code)
        assert not (found := re.search(f".*({forbidden}).*", code)), f"{spec}: {found}"


@pytest.mark.skipif("avx512f" not in cpu_flags(), reason="needs an AVX-512 machine's cache")
def test_the_search_for_wide_instructions_finds_them():
    # Else the test above could pass on any library.
    spec = attention_spec("vec", torch.float32, 16)
    ensure_compiled([spec])
    assert re.search(r"%zmm", disassembly(artifact_path(spec)))


def record(monkeypatch, run) -> tuple:
    """Arguments of the one kernel call that `run` makes."""
    calls = []
    for module in ("attention", "compaction"):
        monkeypatch.setattr(
            f"tvm_ops.{module}.kernel", lambda spec: lambda *arguments: calls.append(arguments)
        )
    run()
    monkeypatch.undo()
    [arguments] = calls
    return arguments


def check_through_driver(monkeypatch, driver: CDriver, target: str, variant, threads: int) -> None:
    """Both kernels of a variant, called from C."""
    layout, dtype, _ = variant
    built = TARGETS[target]
    library = artifact_path(attention_spec(*variant), built)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for case in attention_cases(*variant):
        out = case.out.clone()

        def run(case=case, out=out):
            tree_attention(case.query, case.kv_cache, out, case.batch, **case.options)

        arguments = record(monkeypatch, run)
        assert out.isnan().all(), "a kernel ran in this process"
        call = RecordedCall(arguments, [case.query, case.kv_cache, out])
        driver.call(library, "__tvm_ffi_tree_attention", call, threads)
        check_attention(case, out)
    torch.set_num_threads(before)

    def move(group, source, target):
        arguments = record(monkeypatch, lambda: compact_kv(group, source, target))
        call = RecordedCall(arguments, group.caches, pointers=[0])
        library = artifact_path(compact_spec(layout, dtype), built)
        driver.call(library, "__tvm_ffi_compact_kv", call, threads)

    check_compaction(layout, dtype, move)


@pytest.mark.parametrize("variant", VARIANTS["aarch64"], ids=lambda v: f"{v[0]}-{v[1]}-{v[2]}")
@pytest.mark.parametrize("compiled_for", ["aarch64"], indirect=True)
def test_arm_kernels_are_right_under_emulation(compiled_for, variant, monkeypatch, tmp_path):
    launcher = artifact_path(KernelSpec("launcher"), TARGETS["aarch64"])
    program = compile_driver("aarch64-linux-gnu-gcc", tmp_path)
    driver = CDriver(program, launcher, ("qemu-aarch64", "-L", str(ARM_SYSROOT)))
    # One thread never splits keys, two do.
    for threads in (1, 2):
        check_through_driver(monkeypatch, driver, "aarch64", variant, threads)


def test_kernels_of_this_machine_are_called_from_c(monkeypatch, tmp_path):
    # As docs/tvm_ops.md describes; and tells a mistake of the driver from one of the emulation.
    variant = ("vec", torch.float32, 16)
    ensure_compiled([attention_spec(*variant), compact_spec(*variant[:2])])
    driver = CDriver(compile_driver("gcc", tmp_path), artifact_path(KernelSpec("launcher")))
    check_through_driver(monkeypatch, driver, host_target().name, variant, 2)


def test_the_driver_reports_what_the_kernel_refuses(tmp_path):
    group, source, target = compaction_case("vec", torch.float32)
    ensure_compiled([group.spec])
    driver = CDriver(compile_driver("gcc", tmp_path), artifact_path(KernelSpec("launcher")))
    call = RecordedCall((group.addresses, source.int(), target, 2, 32, 48), group.caches, [0])
    with pytest.raises(RuntimeError, match="source"):
        driver.call(artifact_path(group.spec), "__tvm_ffi_compact_kv", call, 1)


def test_every_layout_has_a_variant_that_ran_elsewhere():
    # A layout added later must not go untested on the narrow targets.
    ran = {find_layout(layout).memory for layout, _, _ in VARIANTS["aarch64"]}
    from tvm_ops import LAYOUTS

    assert ran == {kind.memory for kind in LAYOUTS.values() if not kind.strided}
