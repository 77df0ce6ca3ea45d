"""Runs WGSL by wgpu-native, on any Vulkan device; Mesa's lavapipe is one without a GPU."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import wgpu
from torch import Tensor

from tests.tvm_ops.gpu_call import Values, memory

_FORMATS = {"int32": "i", "uint32": "I", "float32": "f"}


class WebGpuEngine:
    """wgpu-native, with WebGPU's default limits. Raises LookupError without a Vulkan device."""

    language = "webgpu"

    def __init__(self) -> None:
        found = [
            adapter
            for adapter in wgpu.gpu.enumerate_adapters_sync()
            if adapter.info["backend_type"] == "Vulkan"
        ]
        if not found:
            raise LookupError("no Vulkan device")
        info = found[0].info
        self.device = f"{info['device']}, {info['description']}"
        self._device = found[0].request_device_sync()

    @cache  # noqa: B019 (lives as long as the tests)
    def _pipeline(self, path: Path, name: str) -> wgpu.GPUComputePipeline:
        module = self._device.create_shader_module(code=path.read_text())
        stage = {"module": module, "entry_point": name}
        return self._device.create_compute_pipeline(layout="auto", compute=stage)

    def run(self, path: Path, about: dict[str, Any], grid: tuple[int, int], values: Values) -> None:
        """See Engine."""
        pipeline, entries, tensors = self._pipeline(path, about["entry"]), [], []
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
        scalars: dict[int, bytes] = {}
        for argument in about["arguments"]:
            value, binding = values[argument["name"]], argument["binding"]
            if isinstance(value, Tensor):
                bytes_ = memory(value).numpy()
                # A buffer can't be empty, and its size is a multiple of 4.
                data = bytes_.tobytes() + bytes(-len(bytes_) % 4) or bytes(4)
                buffer = self._device.create_buffer_with_data(data=data, usage=usage)
                entries.append({"binding": binding, "resource": {"buffer": buffer}})
                tensors.append((bytes_, buffer))
            else:
                before = scalars.setdefault(binding, b"")
                assert len(before) == argument["offset"]
                scalars[binding] = before + struct.pack(f"<{_FORMATS[argument['kind']]}", value)
        for binding, data in scalars.items():
            data += bytes(-len(data) % 16)
            buffer = self._device.create_buffer_with_data(data=data, usage=wgpu.BufferUsage.UNIFORM)
            entries.append({"binding": binding, "resource": {"buffer": buffer}})
        group = self._device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0), entries=entries
        )
        encoder = self._device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*grid, 1)
        compute.end()
        self._device.queue.submit([encoder.finish()])
        for bytes_, buffer in tensors:
            result = self._device.queue.read_buffer(buffer)
            bytes_[:] = memoryview(result)[: len(bytes_)]
