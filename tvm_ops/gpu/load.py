"""Find, compile if missing, and load CUDA programs."""

from __future__ import annotations

import threading

import torch

from tvm_ops.artifact import KernelSpec, artifact_path, unsealed
from tvm_ops.gpu.cuda_driver import cuda_driver
from tvm_ops.gpu.launch import LoadedProgram
from tvm_ops.gpu.program import Program
from tvm_ops.gpu.targets import GPU_TARGETS
from tvm_ops.load import ensure_compiled

_lock = threading.Lock()
_loaded: dict[tuple[KernelSpec, int], LoadedProgram] = {}


def cuda_program(spec: KernelSpec, device: torch.device) -> LoadedProgram:
    """The program of `spec` on a CUDA device, compiled and loaded on first use.

    Raises ValueError for another device, RuntimeError when it has to be compiled and can't be, or
    can't be loaded.
    """
    if device.type != "cuda":
        raise ValueError(f"layout 'strided' needs tensors on a CUDA device, got {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    found = _loaded.get((spec, index))
    if found is None:
        with _lock:
            ensure_compiled([spec])
            content = unsealed(artifact_path(spec, GPU_TARGETS["cuda"]))
            with torch.cuda.device(index):
                found = LoadedProgram(Program.unpacked(content), cuda_driver())
            _loaded[spec, index] = found
    return found
