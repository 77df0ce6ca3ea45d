"""Loads fat binaries and launches their kernels, through CUDA's driver API.

TVM's wheel has no CUDA runtime, and torch has no public way to launch a compiled kernel.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch


class CudaError(RuntimeError):
    """A call of the driver failed; says which, and why."""


class CudaDriver:
    """The driver library. Its calls use the current device's primary context, which is torch's."""

    def __init__(self) -> None:
        """Raises CudaError if the driver can't be loaded."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"NVIDIA's driver can't be loaded ({error}): install it") from error

    def load(self, code: bytes, names: Sequence[str]) -> list[int]:
        """Load a fat binary into the current device; handles of its kernels `names`."""
        torch.cuda.current_stream()  # makes torch create the context
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), code)
        handles = []
        for name in names:
            handle = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
            assert handle.value is not None
            handles.append(handle.value)
        return handles

    def launch(self, handle: int, grid: tuple[int, int], threads: int, parameters: Any) -> None:
        """Start a kernel on torch's current stream.

        parameters: ctypes array of pointers to the arguments, which are copied before this returns.
        """
        self._call(
            "cuLaunchKernel",
            ctypes.c_void_p(handle),
            *(*grid, 1, threads, 1, 1, 0),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            parameters,
            None,
        )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise CudaError(f"{name} failed: {reason} (error {status})")


@functools.cache
def cuda_driver() -> CudaDriver:
    """The driver of this process."""
    return CudaDriver()
