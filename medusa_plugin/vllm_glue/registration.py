"""What `register()` applies to vLLM: all of it or nothing, any number of times.

vLLM calls the entry point in every process. Nothing here changes an engine that does not ask for
Medusa: each wrapper passes straight through unless the speculative method is ours.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from medusa_plugin.vllm_glue import cli, hooks, host, translate

_MARK = "_medusa_wrapped"


def register() -> None:
    """Extend the installed vLLM with the speculative method "medusa".

    Set `MEDUSA_DISABLE=1` to leave vLLM untouched.

    Raises:
        UnsupportedHostError: the vLLM found is not supported; nothing was changed.
    """
    if os.environ.get("MEDUSA_DISABLE") == "1":
        return
    host.require_supported_host()
    # Everything is resolved before the first change, so a failure leaves vLLM as it was.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample import logits_processor
    from vllm.v1.worker import gpu_model_runner

    if hasattr(EngineArgs.create_engine_config, _MARK):
        return
    wrapped_build = _wrap(logits_processor.build_logitsprocs, _build_logitsprocs)
    changes: list[tuple[Any, str, Any]] = [
        (
            EngineArgs,
            "create_engine_config",
            _wrap(EngineArgs.create_engine_config, _create_engine_config),
        ),
        (EngineArgs, "add_cli_args", staticmethod(_wrap(EngineArgs.add_cli_args, _add_cli_args))),
        (
            EngineArgs,
            "from_cli_args",
            classmethod(_wrap(host.resolve(hooks.REGISTRATION_HOOKS[2]), _from_cli_args)),
        ),
        (
            SamplingParams,
            "_validate_spec_decode",
            _wrap(SamplingParams._validate_spec_decode, _validate_spec_decode),
        ),
        (SamplingParams, "verify", _wrap(SamplingParams.verify, _verify)),
        (logits_processor, "build_logitsprocs", wrapped_build),
        # The runner imported the function by name.
        (gpu_model_runner, "build_logitsprocs", wrapped_build),
        (
            DefaultModelLoader,
            "get_all_weights",
            _wrap(DefaultModelLoader.get_all_weights, _get_all_weights),
        ),
    ]
    for owner, name, replacement in changes:
        setattr(owner, name, replacement)


def _wrap(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(call, _MARK, True)
    return call


def _create_engine_config(
    original: Callable[..., Any], engine_args: Any, *args: Any, **kwargs: Any
) -> Any:
    translate.translate_engine_args(engine_args)
    config = original(engine_args, *args, **kwargs)
    translate.finish_engine_config(config)
    return config


def _add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    return cli.add_arguments(original(parser))


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    cli.apply_arguments(args)
    return original(cls, args)


def _validate_spec_decode(
    original: Callable[..., Any], params: Any, speculative_config: Any
) -> None:
    if not translate.is_medusa(speculative_config):
        original(params, speculative_config)


def _verify(
    original: Callable[..., Any],
    params: Any,
    model_config: Any,
    speculative_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    # Imported here: it imports more of vLLM than may be there before the host is checked.
    from medusa_plugin.vllm_glue.request_control import validate_request

    original(params, model_config, speculative_config, *args, **kwargs)
    validate_request(params, model_config, speculative_config)


def _get_all_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from medusa_plugin.vllm_glue.target_weights import without_heads

    return without_heads(original, *args, **kwargs)


def _build_logitsprocs(
    original: Callable[..., Any], vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    if translate.is_medusa(vllm_config.speculative_config):
        # The walk runs the full sampler at every row, so processors work as without drafts.
        return original(translate.without_speculation(vllm_config), *args, **kwargs)
    return original(vllm_config, *args, **kwargs)
