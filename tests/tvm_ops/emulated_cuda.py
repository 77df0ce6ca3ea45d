"""Runs the CUDA source that TVM writes, on the CPU: what cuda_emulation/cuda.h says."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu.launch import LoadedProgram
from tvm_ops.gpu.program import Program

HEADERS = Path(__file__).parent / "cuda_emulation"
# Functions around single instructions, which the header has in its own way.
_INSTRUCTIONS = re.compile(
    r"^__forceinline__ __device__ \w+(?: int)? tvm_builtin\w+\([^)]*\) \{\n.*\n\}\n", re.M
)
_WRITE = """
import sys
from tvm_ops.artifact import KernelSpec
from tvm_ops.gpu.compile import cuda_kernels, write_source
from tvm_ops.gpu.program import Program
from tvm_ops.gpu.targets import GPU_TARGETS

source = write_source(KernelSpec.parse(sys.argv[1]), GPU_TARGETS["cuda"])
program = Program(source.text.encode(), cuda_kernels(source), **source.tile)
sys.stdout.buffer.write(program.packed())
"""


class EmulatedDriver:
    """Stands in for CudaDriver; a program's code is its CUDA source."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launches: list[str] = []
        self.reported = 0
        self._functions: dict[int, tuple[str, Any]] = {}
        self._library: Any = None

    def build(self, program: Program) -> None:
        """Compile the source with the emulation's header, and a launcher for each kernel."""
        source = _INSTRUCTIONS.sub("", program.code.decode())
        assert "asm" not in source.split("#endif")[-1], "an instruction is not emulated"
        launchers = []
        for kernel in program.kernels:
            types = _argument_types(source, kernel.name)
            values = ", ".join(f"*({kind}*)parameters[{i}]" for i, kind in enumerate(types))
            launchers.append(
                f'extern "C" void launch_{kernel.name}(unsigned x, unsigned y, unsigned threads, '
                "void** parameters, int backwards) { emulation::backwards = backwards; "
                f"emulation::launch(dim3(x, y), threads, [&] {{ {kernel.name}_kernel({values}); "
                "}); }\n"
            )
        text, library = self.directory / "kernels.cpp", self.directory / "kernels.so"
        text.write_text(source + "".join(launchers))
        command = ["g++", "-O2", "-march=native", "-std=c++17", "-w", "-shared", "-fPIC"]
        command += ["-fno-strict-aliasing", f"-I{HEADERS}", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def load(self, code: bytes, names: list[str]) -> list[int]:
        """Handles of the kernels, which were built before."""
        for handle, name in enumerate(names):
            name = name.removesuffix("_kernel")
            self._functions[handle] = (name, getattr(self._library, f"launch_{name}"))
        return list(range(len(names)))

    def launch(self, handle: int, grid: tuple[int, int], threads: int, parameters: Any) -> None:
        """Run all blocks, one after the other; the order of threads changes with each launch."""
        name, function = self._functions[handle]
        self.launches.append(name)
        function(*grid, threads, parameters, len(self.launches) % 2)


def _argument_types(source: str, name: str) -> list[str]:
    match = re.search(rf"{name}_kernel\(([^)]*)\) \{{", source)
    assert match
    return [
        text.strip().rsplit(" ", 1)[0] for text in match[1].replace("__restrict__", "").split(",")
    ]


@cache
def cuda_source(spec: KernelSpec) -> Program:
    """The program of `spec` with CUDA source as its code; a child process runs TVM."""
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(spec)], stdout=subprocess.PIPE, check=True
    )
    return Program.unpacked(done.stdout)


def emulated_program(spec: KernelSpec, directory: Path) -> tuple[LoadedProgram, EmulatedDriver]:
    """The program of `spec`, ready to run on the CPU."""
    program = cuda_source(spec)
    driver = EmulatedDriver(directory)
    driver.build(program)
    return LoadedProgram(program, driver), driver
