"""Medusa heads for vLLM: token trees verified in one pass of the target model.

Importing this package is cheap: torch, vLLM and TVM are loaded only by what needs them.
"""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """Entry point of `vllm.general_plugins`: extend the installed vLLM, all or nothing.

    vLLM calls it in every process, possibly several times.

    Raises:
        UnsupportedHostError: the vLLM found is not supported; the message names the remedy.
    """
    from medusa_plugin.vllm_glue.registration import register as register_with_vllm

    register_with_vllm()
