"""Runs OpenCL source on PoCL, which is an OpenCL device made of this machine's processor."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from torch import Tensor

from tests.tvm_ops.gpu_call import Values, memory

_SCALARS = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


class OpenClEngine:
    """PoCL. Raises LookupError if this machine does not have it."""

    language = "opencl"

    def __init__(self) -> None:
        try:
            platforms = cl.get_platforms()
        except cl.LogicError as error:
            raise LookupError(f"no OpenCL platform: {error}") from error
        for platform in platforms:
            if platform.name == "Portable Computing Language":
                self._device = platform.get_devices()[0]
                self.device = f"{self._device.name}, {platform.version}"
                self._context = cl.Context([self._device])
                self._queue = cl.CommandQueue(self._context)
                return
        raise LookupError(f"no PoCL among {[platform.name for platform in platforms]}")

    @cache  # noqa: B019 (lives as long as the tests)
    def _kernel(self, path: Path, name: str) -> cl.Kernel:
        return cl.Kernel(cl.Program(self._context, path.read_text()).build(), name)

    def run(self, path: Path, about: dict[str, Any], grid: tuple[int, int], values: Values) -> None:
        """See Engine."""
        kernel, bound = self._kernel(path, about["entry"]), []
        for argument in about["arguments"]:
            value = values[argument["name"]]
            if isinstance(value, Tensor):
                assert argument["kind"] == "pointer"
                bytes_ = memory(value).numpy()
                flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
                # A buffer can't be empty.
                filled = bytes_ if len(bytes_) else np.zeros(4, np.uint8)
                buffer = cl.Buffer(self._context, flags, hostbuf=filled)
                bound.append((bytes_, buffer))
                kernel.set_arg(argument["index"], buffer)
            else:
                kernel.set_arg(argument["index"], _SCALARS[argument["kind"]](value))
        threads = about["threads"]
        cl.enqueue_nd_range_kernel(self._queue, kernel, (grid[0] * threads, grid[1]), (threads, 1))
        for bytes_, buffer in bound:
            if len(bytes_):
                cl.enqueue_copy(self._queue, bytes_, buffer)
        self._queue.finish()
