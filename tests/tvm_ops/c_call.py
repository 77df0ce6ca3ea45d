"""Kernel calls outside this process: what a kernel was called with, as kernel_driver.c reads it.

Memory is passed as whole torch storages. Integers that point into them become addresses, and
tensors named as tables of pointers are filled in by the driver.
"""

from __future__ import annotations

import itertools
import struct
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tvm_ffi import libinfo

_INT, _FLOAT, _ADDRESS, _TENSOR = range(4)
_DLPACK_CODES = {torch.int32: 0, torch.int64: 0, torch.float32: 2, torch.float64: 2}
Place = tuple[int, int]  # block, offset in bytes


@dataclass(frozen=True)
class CDriver:
    """kernel_driver.c compiled for some machine, with what starts it there."""

    program: Path
    launcher: Path
    prefix: tuple[str, ...] = ()

    def call(self, kernel: Path, entry: str, call: RecordedCall, threads: int) -> None:
        """Run the kernel of a library on the call's memory, in place."""
        given, result = (self.program.with_suffix(suffix) for suffix in (".call", ".result"))
        given.write_bytes(call.encode())
        command = [*self.prefix, self.program, self.launcher, kernel, entry, given, result]
        done = subprocess.run(
            [str(part) for part in command],
            env={"OMP_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"driver failed with status {done.returncode}: {done.stderr}")
        call.decode(result.read_bytes())


def compile_driver(compiler: str, directory: Path) -> Path:
    """kernel_driver.c compiled in `directory`; its headers come with tvm-ffi."""
    program = directory / "driver"
    headers = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    source = Path(__file__).with_name("kernel_driver.c")
    options = ["-std=gnu11", "-O1", "-Wall", "-rdynamic", "-fopenmp", *headers]
    command = [compiler, *options, str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    return program


class RecordedCall:
    """The arguments of one kernel call, and the memory they refer to."""

    def __init__(
        self, arguments: Sequence[Any], memory: Sequence[Tensor], pointers: Collection[int] = ()
    ) -> None:
        """Take over a call's positional arguments.

        memory: tensors that integer arguments may point into. pointers: indices of the arguments
        that are tensors of pointers into them.
        """
        self.blocks: list[Any] = []
        for tensor in memory:
            self._place(tensor)
        self.pointers: list[tuple[Place, Place]] = []
        self.arguments = b"".join(
            self._argument(argument, index in pointers) for index, argument in enumerate(arguments)
        )
        self.count = len(arguments)

    def encode(self) -> bytes:
        """Contents of the call file."""
        blocks = [(len(b := bytes_of(storage)), b) for storage in self.blocks]
        numbers = itertools.chain.from_iterable(itertools.chain(*pair) for pair in self.pointers)
        return b"".join(
            [
                _ints(len(blocks)),
                *(_ints(size) + data for size, data in blocks),
                _ints(len(self.pointers), *numbers, self.count),
                self.arguments,
            ]
        )

    def decode(self, result: bytes) -> None:
        """Copy the result file back, but for tables of pointers, which differ over there."""
        assert len(result) == sum(storage.nbytes() for storage in self.blocks)
        tables = {where[0] for where, _ in self.pointers}
        begin = 0
        for index, storage in enumerate(self.blocks):
            end = begin + storage.nbytes()
            if index not in tables and end > begin:
                data = torch.frombuffer(bytearray(result[begin:end]), dtype=torch.uint8)
                torch.tensor([], dtype=torch.uint8).set_(storage).copy_(data)
            begin = end

    def _place(self, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()
        offset = tensor.storage_offset() * tensor.itemsize
        for index, known in enumerate(self.blocks):
            if known.data_ptr() == storage.data_ptr() and known.nbytes() == storage.nbytes():
                return index, offset
        self.blocks.append(storage)
        return len(self.blocks) - 1, offset

    def _find(self, address: int) -> Place | None:
        for index, storage in enumerate(self.blocks):
            if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                return index, address - storage.data_ptr()
        return None

    def _argument(self, argument: Any, is_table: bool) -> bytes:
        if isinstance(argument, float):
            return _ints(_FLOAT) + struct.pack("=d", argument)
        if isinstance(argument, int):
            place = self._find(argument)
            return _ints(_INT, argument) if place is None else _ints(_ADDRESS, *place)
        tensor = argument if isinstance(argument, Tensor) else torch.from_dlpack(argument)
        block, offset = self._place(tensor)
        if is_table:
            for i, address in enumerate(tensor.tolist()):
                target = self._find(address)
                assert target is not None, "a pointer into memory that was not given"
                self.pointers.append(((block, offset + 8 * i), target))
        code, bits = _DLPACK_CODES[tensor.dtype], 8 * tensor.itemsize
        return _ints(
            *(_TENSOR, block, offset, code, bits, tensor.dim()), *tensor.shape, *tensor.stride()
        )


def bytes_of(storage: Any) -> bytes:
    """A copy of a torch storage."""
    return bytes(torch.tensor([], dtype=torch.uint8).set_(storage).numpy())


def _ints(*values: int) -> bytes:
    return struct.pack(f"={len(values)}q", *values)
