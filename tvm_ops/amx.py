"""Linux's leave to use AMX: a process must ask for it before its first tile instruction."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

logger = logging.getLogger(__name__)

_SYS_ARCH_PRCTL = 158  # on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18  # the processor state that holds the tiles


@functools.cache
def amx_permitted() -> bool:
    """Ask for permission to use AMX in this process and the threads it will have.

    Asked once. Containers and virtual machines may show the processor's flag and refuse; so does
    Linux while a thread has a signal stack too small for the tiles.
    """
    error = _request()
    if error:
        logger.warning(
            "this processor has AMX, but Linux does not let this process use it (%s): kernels for "
            "AVX-512 run instead",
            os.strerror(error),
        )
    return not error


def _request() -> int:
    """The error number of Linux's answer, 0 for a yes."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    numbers = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)
    return ctypes.get_errno() if syscall(*map(ctypes.c_long, numbers)) else 0
