"""Runs the Metal text that TVM writes as C++ on the CPU: no Metal compiler exists for Linux."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.tvm_ops.gpu_call import Values

HEADERS = Path(__file__).parent / "metal_emulation"
_FORMATS = {"int32": "i", "int64": "q", "float32": "f"}


class MetalEmulation:
    """What metal_emulation/metal_stdlib says. Launches alternate the order of threads."""

    language = "metal"
    device = "emulation (C++)"

    def __init__(self, directory: Path) -> None:
        self._directory, self._launches = directory, 0

    @cache  # noqa: B019 (lives as long as the tests)
    def _function(self, path: Path, name: str, buffers: int) -> Any:
        source = path.read_text()
        two = "uint2 blockIdx" in source
        place = "uint2{{{0}.x, {0}.y}}" if two else "{0}.x"
        thread = "uint2{emulation::current, 0}" if two else "emulation::current"
        types = re.findall(r"device (\w+)\* \w+ \[\[", source)
        assert len(types) == buffers
        arguments = [f"({kind}*)buffers[{i}]" for i, kind in enumerate(types)]
        arguments += [f"*(const {name}_args_t*)scalars", place.format("emulation::block"), thread]
        launcher = (
            'extern "C" void launch(unsigned x, unsigned y, unsigned threads, void** buffers, '
            "void* scalars, int backwards) { emulation::backwards = backwards; "
            "emulation::launch(dim3(x, y), threads, [&] { "
            f"{name}({', '.join(arguments)}); }}); }}\n"
        )
        text = self._directory / f"{path.name}.cpp"
        library = text.with_suffix(".so")
        text.write_text(source + launcher)
        command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
        command += [f"-I{HEADERS}", "-o", str(library), str(text)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library)).launch

    def run(self, path: Path, about: dict[str, Any], grid: tuple[int, int], values: Values) -> None:
        """See Engine."""
        pointers, scalars = {}, b""
        for argument in about["arguments"]:
            value = values[argument["name"]]
            if isinstance(value, Tensor):
                pointers[argument["buffer"]] = value.data_ptr()
            else:
                assert argument["buffer"] == len(pointers)
                scalars = scalars.ljust(argument["offset"], b"\0")
                scalars += struct.pack(f"<{_FORMATS[argument['kind']]}", value)
        buffers = (ctypes.c_void_p * len(pointers))(*(pointers[i] for i in range(len(pointers))))
        self._launches += 1
        launch = self._function(path, about["entry"], len(pointers))
        launch(*grid, about["threads"], buffers, scalars.ljust(512, b"\0"), self._launches % 2)
