"""Worker and model runner for NVIDIA GPUs: they differ from vLLM's only in what they build."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from medusa_plugin.vllm_glue import attention_cuda, device_hooks, hooks, host
from medusa_plugin.vllm_glue.model_runner import MedusaModelRunner


class MedusaCUDAModelRunner(MedusaModelRunner):
    """vLLM's model runner that verifies trees on a GPU."""

    tree_attention = attention_cuda


class MedusaCUDAWorker(Worker):
    """vLLM's GPU worker with tree verification."""

    def _make_model_runner(self) -> MedusaCUDAModelRunner:
        """Our model runner in place of vLLM's.

        Raises:
            UnsupportedHostError: vLLM has changed something that the runner overrides.
        """
        host.check_hooks(hooks.WORKER_HOOKS + device_hooks.CUDA_HOOKS)
        host.require_v1_runner(self.use_v2_model_runner)
        return MedusaCUDAModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then measure what a step costs."""
        times = super().compile_or_warm_up_model()
        self.model_runner.measure_costs()
        return times
