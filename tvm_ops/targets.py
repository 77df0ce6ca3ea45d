"""The processors that kernels are compiled for, and which of them this machine has."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tvm_ops.amx import amx_permitted
from tvm_ops.gpu.targets import GPU_TARGETS, GpuTarget

TARGET_VARIABLE = "MEDUSA_KERNEL_TARGET"
REFERENCE = "reference"  # value of TARGET_VARIABLE that asks for the plain torch twins
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # other names of the same machine


@dataclass(frozen=True)
class CpuTarget:
    """A kind of processor.

    machine: as platform.machine() calls it. mcpu, mattr: LLVM's names of processor and features.
    flags: what /proc/cpuinfo must list for the code to run. amx: kernels may use tile registers.
    """

    name: str
    machine: str
    mcpu: str
    mattr: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    amx: bool = False

    @property
    def llvm(self) -> dict[str, object]:
        """TVM's target."""
        triple = f"{self.machine}-linux-gnu"
        target: dict[str, object] = {"kind": "llvm", "mtriple": triple, "mcpu": self.mcpu}
        return {**target, "mattr": list(self.mattr)} if self.mattr else target

    @property
    def identity(self) -> dict[str, object]:
        """What tells its artefacts from those of other targets."""
        return self.llvm

    @property
    def suffix(self) -> str:
        """Of files."""
        return ".so"

    @property
    def native(self) -> bool:
        """Whether this machine is of that architecture, flags aside."""
        return machine() == self.machine

    @property
    def compilers(self) -> tuple[str, ...]:
        """C compilers that link for it, the preferred first."""
        return ("gcc", "cc") if self.native else (f"{self.machine}-linux-gnu-gcc",)

    @property
    def compiler_package(self) -> str:
        """Debian package of the compiler."""
        return "gcc" if self.native else f"gcc-{self.machine.replace('_', '-')}-linux-gnu"


_AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
# Best first per machine. The x86-64 levels are those of the psABI, with the flags that tell them
# apart; bfloat16 is emulated with shifts but on AMX, so any ARMv8-A processor will do. Of Sapphire
# Rapids only AMX is used beside x86-64-v4: virtual machines often hide some other of its features.
TARGETS: Mapping[str, CpuTarget] = MappingProxyType(
    {
        target.name: target
        for target in (
            CpuTarget(
                "sapphirerapids",
                "x86_64",
                "x86-64-v4",
                mattr=("+amx-tile", "+amx-bf16"),
                flags=_AVX512_FLAGS | {"amx_tile", "amx_bf16"},
                amx=True,
            ),
            CpuTarget("x86-64-v4", "x86_64", "x86-64-v4", flags=_AVX512_FLAGS),
            CpuTarget(
                "x86-64-v3",
                "x86_64",
                "x86-64-v3",
                flags=frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}),
            ),
            CpuTarget("x86-64", "x86_64", "x86-64"),
            CpuTarget("aarch64", "aarch64", "generic", mattr=("+neon",)),
        )
    }
)


def find_target(name: str | None) -> CpuTarget | GpuTarget:
    """The target called `name`, None for this machine's processor.

    Raises ValueError for a name that is neither in TARGETS nor in GPU_TARGETS, and as host_target.
    """
    if name is None:
        return host_target()
    target = TARGETS.get(name) or GPU_TARGETS.get(name)
    if target is None:
        known = ", ".join([*TARGETS, *GPU_TARGETS])
        raise ValueError(f"unknown target {name!r}: expected one of {known}")
    return target


def best_target(machine: str, flags: Collection[str], amx: bool = True) -> CpuTarget:
    """The best target for a machine (platform.machine()) with these /proc/cpuinfo flags.

    amx: whether AMX may be used where the flags list it.

    Raises ValueError for a machine without kernels.
    """
    machine = _MACHINES.get(machine, machine)
    for target in TARGETS.values():
        if target.machine == machine and target.flags <= set(flags) and (amx or not target.amx):
            return target
    known = sorted({target.machine for target in TARGETS.values()})
    raise ValueError(f"no kernels for machine {machine!r}: expected one of {', '.join(known)}")


def host_target() -> CpuTarget:
    """The best target of this machine, or the one named by MEDUSA_KERNEL_TARGET.

    "reference" names no target: kernels, where they are loaded nevertheless, are the machine's
    own. Asks for permission to use AMX where the answer matters; refused, a machine's best target
    is one without. Raises ValueError for an unknown name and for a target that can't run here.
    """
    forced = os.environ.get(TARGET_VARIABLE)
    if not forced or forced == REFERENCE:
        best = best_target(machine(), cpu_flags())
        if best.amx and not amx_permitted():
            best = best_target(machine(), cpu_flags(), amx=False)
        return best
    if forced not in TARGETS:
        raise ValueError(
            f"{TARGET_VARIABLE}={forced!r}: expected one of {', '.join([*TARGETS, REFERENCE])}"
        )
    target = TARGETS[forced]
    if not target.native:
        raise ValueError(
            f"{TARGET_VARIABLE}={forced}: this machine is {machine()}, so these kernels can't run "
            f"here; to build them for another machine use: python -m tvm_ops.build --target "
            f"{forced} --out DIR"
        )
    missing = sorted(target.flags - cpu_flags())
    if missing:
        raise ValueError(f"{TARGET_VARIABLE}={forced}: this processor lacks {', '.join(missing)}")
    if target.amx and not amx_permitted():
        raise ValueError(f"{TARGET_VARIABLE}={forced}: Linux does not let this process use AMX")
    return target


def machine() -> str:
    """This machine's architecture as TARGETS spells it."""
    found = platform.machine()
    return _MACHINES.get(found, found)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Flags of this machine's first processor, of /proc/cpuinfo if there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()
