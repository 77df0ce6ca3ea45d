"""Calls of GPU kernels by argument name, and how arguments tell strides."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from tvm_ops.gpu.program import Kernel, Program

_TYPES: Mapping[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


class Driver(Protocol):
    """What runs kernels: CudaDriver, or in tests its emulation."""

    def load(self, code: bytes, names: list[str]) -> list[int]:
        """Handles of the kernels `names` of `code`."""
        ...

    def launch(self, handle: int, grid: tuple[int, int], threads: int, parameters: Any) -> None:
        """Start a kernel; parameters is an array of pointers to its arguments."""
        ...


class LoadedKernel:
    """A kernel on a device. Calls from several threads are made one after the other."""

    def __init__(self, kernel: Kernel, handle: int, driver: Driver) -> None:
        self._handle, self._driver, self._threads = handle, driver, kernel.threads
        self._cells = [(name, _TYPES[kind]()) for name, kind in kernel.arguments]
        addresses = [ctypes.addressof(cell) for _, cell in self._cells]
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._lock = threading.Lock()

    def __call__(self, grid: tuple[int, int], values: Mapping[str, int | float]) -> None:
        """Launch `grid` blocks with the arguments `values`, which may hold others as well."""
        with self._lock:
            for name, cell in self._cells:
                cell.value = values[name]
            self._driver.launch(self._handle, grid, self._threads, self._parameters)


class LoadedProgram:
    """A program on the current device; kernels by name."""

    def __init__(self, program: Program, driver: Driver) -> None:
        """Raises CudaError if the device can't run the program."""
        names = [f"{kernel.name}_kernel" for kernel in program.kernels]
        self.program = program
        self.kernels = {
            kernel.name: LoadedKernel(kernel, handle, driver)
            for kernel, handle in zip(
                program.kernels, driver.load(program.code, names), strict=True
            )
        }


def stride_in_words(tensor: Tensor, dim: int, name: str, align: int = 4) -> int:
    """Stride of `dim` in uint32 words. Raises ValueError unless rows begin at `align` bytes."""
    stride = tensor.stride(dim) * tensor.element_size()
    if (tensor.shape[dim] > 1 and stride % align) or tensor.data_ptr() % align:
        raise ValueError(
            f"{name} must begin at a multiple of {align} bytes, with strides of multiples of it; "
            f"got address {tensor.data_ptr():#x} and strides {tensor.stride()}"
        )
    return stride // 4
