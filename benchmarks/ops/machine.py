"""The limits of the machine, and copies of scattered pieces: machine.c, compiled with gcc.

It runs on the OpenMP pool that torch, vLLM and tvm_ops use here.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ops.timing import Call, Record, clock
from tvm_ops.openmp import find_openmp

SOURCE = Path(__file__).with_name("machine.c")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DRAM_BYTES = 256 << 20  # per thread; far beyond any cache
KERNEL = "gcc -O3 -march=native"


class Pieces(ctypes.Structure):
    """machine.c's Pieces: equal pieces at equal distances, from one place to another."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("from_", "to", "groups", "group_stride", "count", "stride", "size")
    )

    @property
    def bytes(self) -> int:
        """Bytes that are copied."""
        return int(self.groups * self.count * self.size)


class Machine:
    """The functions of machine.c, compiled into `directory`, on `threads` threads."""

    def __init__(self, directory: Path) -> None:
        path = directory / "machine.so"
        command = [*KERNEL.split(), "-shared", "-fPIC", "-o", str(path), str(SOURCE)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(str(path))
        for name in ("multiply", "read", "copy", "copy_pieces"):
            getattr(self.library, f"machine_{name}").restype = None
        self.library.machine_multiply.restype = ctypes.c_int64
        openmp = find_openmp()
        self.parallel = ctypes.c_void_p(openmp.addresses[0] if openmp is not None else None)

    def multiply(self, threads: int, rounds: int) -> int:
        """Do independent fp32 multiply-adds; how many operations."""
        return int(self.library.machine_multiply(self.parallel, threads, ctypes.c_int64(rounds)))

    def read(self, threads: int, source: torch.Tensor, size: int, passes: int) -> None:
        """Each thread reads its own `size` bytes of `source`, `passes` times."""
        address, *counts = _int64s(source.data_ptr(), size, passes)
        self.library.machine_read(self.parallel, threads, address, *counts)

    def copy(self, threads: int, target: torch.Tensor, source: torch.Tensor, size: int) -> None:
        """Each thread copies its own `size` bytes of `source` to `target`."""
        self.library.machine_copy(
            self.parallel, threads, *_int64s(target.data_ptr(), source.data_ptr(), size)
        )

    def copier(self, bases: Sequence[int], pieces: Sequence[Pieces], call: bool) -> PieceCopier:
        """A call that copies `pieces` within each of the memories at `bases`."""
        return PieceCopier(self, bases, pieces, call)


class PieceCopier:
    """Copies pieces with memcpy when called; `call`: never inlined."""

    def __init__(
        self, machine: Machine, bases: Sequence[int], pieces: Sequence[Pieces], call: bool
    ) -> None:
        self.function = machine.library.machine_copy_pieces
        self.bases = (ctypes.c_int64 * len(bases))(*bases)
        self.pieces = (Pieces * len(pieces))(*pieces)
        self.arguments = (
            self.bases,
            ctypes.c_int64(len(bases)),
            self.pieces,
            ctypes.c_int64(len(pieces)),
            int(call),
        )
        self.parallel = machine.parallel

    def __call__(self) -> None:
        """Copy all pieces once."""
        self.function(self.parallel, torch.get_num_threads(), *self.arguments)


def _int64s(*values: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(map(ctypes.c_int64, values))


@dataclass(frozen=True)
class Limits:
    """Measured with one number of threads: GFLOP/s and GB/s of all together.

    read: level of the memory -> (bytes per thread that fit, GB/s), the fastest first. copy counts
    each byte once.
    """

    threads: int
    fma_gflops: float
    read: dict[str, tuple[int, float]]
    copy_gbps: float

    def read_gbps(self, size: int) -> float:
        """Of the fastest level that holds `size` bytes shared out over the threads."""
        fits = [rate for room, rate in self.read.values() if size <= room * self.threads]
        return fits[0] if fits else self.read["dram"][1]

    def seconds(self, flops: int, size: int) -> float:
        """The least time for `flops` fp32 operations on `size` bytes read once."""
        return max(flops / self.fma_gflops, size / self.read_gbps(size)) / 1e9

    def as_record(self) -> Record:
        """For the JSON file."""
        read = {
            level: {"bytes_per_thread": None if level == "dram" else room, "gbps": round(rate, 2)}
            for level, (room, rate) in self.read.items()
        }
        return {
            "threads": self.threads,
            "fma_fp32_gflops": round(self.fma_gflops, 1),
            "read": read,
            "memcpy_gbps": round(self.copy_gbps, 2),
        }


def measure_limits(machine: Machine, threads: int, repeats: int = 9) -> Limits:
    """The best of `repeats`: a limit is what the machine does when nothing disturbs it."""
    rounds = 4_000_000
    flops = machine.multiply(threads, rounds)
    fma = flops / _fastest(lambda: machine.multiply(threads, rounds), repeats) / 1e9
    source = torch.ones(threads * DRAM_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    read = {}
    for level, room in _levels(threads).items():
        size = room // 2 // 512 * 512 if level != "dram" else DRAM_BYTES
        passes = max(1, (256 << 20) // size)
        call = functools.partial(machine.read, threads, source, size, passes)
        seconds = _fastest(call, repeats)
        read[level] = (room, threads * size * passes / seconds / 1e9)
    seconds = _fastest(lambda: machine.copy(threads, target, source, DRAM_BYTES), repeats)
    return Limits(threads, fma, read, threads * DRAM_BYTES / seconds / 1e9)


def _fastest(call: Call, repeats: int) -> float:
    call()
    return min(clock(call) for _ in range(repeats))


def _levels(threads: int) -> dict[str, int]:
    """Bytes per thread that each level of the memory has, by the kernel's description."""
    levels = {}
    for folder in sorted(CACHES.glob("index*")):
        if (folder / "type").read_text().strip() == "Instruction":
            continue
        level = int((folder / "level").read_text())
        size = int((folder / "size").read_text().strip().removesuffix("K")) << 10
        if level == 2:
            levels["l2"] = size
        elif level == 3:
            # Half of it: a guest often shares the last level with others.
            levels["l3"] = size // 2 // threads
    return {**levels, "dram": 1 << 62}
