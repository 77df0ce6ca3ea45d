"""Worker and model runner for CPUs: they differ from vLLM's only in what they build."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from medusa_plugin.vllm_glue import attention, device_hooks, hooks, host
from medusa_plugin.vllm_glue.model_runner import MedusaModelRunner


class MedusaCPUModelRunner(MedusaModelRunner, CPUModelRunner):
    """vLLM's CPU model runner that verifies trees."""

    tree_attention = attention


class MedusaCPUWorker(CPUWorker):
    """vLLM's CPU worker with tree verification."""

    def init_device(self) -> None:
        """Set the device up as vLLM does, then put our model runner in place of vLLM's.

        Raises:
            UnsupportedHostError: vLLM has changed something that the runner overrides.
        """
        host.check_hooks(hooks.WORKER_HOOKS + device_hooks.CPU_HOOKS)
        super().init_device()
        host.require_v1_runner(self.use_v2_model_runner)
        self.model_runner = MedusaCPUModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then measure what a step costs."""
        times = super().compile_or_warm_up_model()
        self.model_runner.measure_costs()
        return times
