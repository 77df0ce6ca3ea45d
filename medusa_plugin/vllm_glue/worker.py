"""Worker classes: they differ from vLLM's only in the model runner."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from medusa_plugin.vllm_glue import host
from medusa_plugin.vllm_glue.model_runner import MedusaCPUModelRunner


class MedusaCPUWorker(CPUWorker):
    """vLLM's CPU worker with tree verification."""

    def init_device(self) -> None:
        """Set the device up as vLLM does, then put our model runner in place of vLLM's.

        Raises:
            UnsupportedHostError: vLLM has changed something that the runner overrides.
        """
        host.check_hooks(host.WORKER_HOOKS)
        super().init_device()
        if self.use_v2_model_runner:
            raise host.UnsupportedHostError(
                "vLLM chose its V2 model runner, which medusa does not support: unset "
                "VLLM_USE_V2_MODEL_RUNNER"
            )
        self.model_runner = MedusaCPUModelRunner(self.vllm_config, self.device)
