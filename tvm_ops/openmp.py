"""Runs TVM kernels on the OpenMP pool that torch uses in this process."""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SYMBOLS = ("GOMP_parallel", "omp_get_max_threads", "omp_in_parallel")
# TVM's C ABI for parallel loops and scratch, and our functions for it.
_CONTEXT_SYMBOLS = {
    b"__TVMBackendParallelLaunch": "tvm_ops_parallel_launch",
    b"__TVMBackendAllocWorkspace": "tvm_ops_alloc",
    b"__TVMBackendFreeWorkspace": "tvm_ops_free",
}


@dataclass(frozen=True)
class OpenMP:
    """Entry points of the OpenMP library that torch calls, and the file it was loaded from."""

    path: str
    addresses: tuple[int, ...]


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


@functools.cache
def find_openmp() -> OpenMP | None:
    """The OpenMP library that torch's own calls bind to, or None; loads nothing.

    Like the dynamic linker, looks in the global scope first (LD_PRELOAD, and what torch loaded
    globally) and then in torch's own dependencies.
    """
    libraries = [ctypes.CDLL(None)]
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if torch_cpu.exists():
        libraries.append(ctypes.CDLL(str(torch_cpu)))  # already in the process: only a handle
    for library in libraries:
        if all(hasattr(library, name) for name in _SYMBOLS):
            addresses = tuple(_address(library, name) for name in _SYMBOLS)
            return OpenMP(_defining_file(addresses[0]), addresses)
    return None


def bind_launcher(path: Path) -> None:
    """Load our launcher from `path` and make it the one that TVM kernels loaded later call.

    Raises RuntimeError if tvm-ffi refuses the registration.
    """
    from tvm_ffi import libinfo

    launcher = ctypes.CDLL(str(path))
    ffi = ctypes.CDLL(libinfo.find_libtvm_ffi())
    openmp = find_openmp()
    if openmp is None:
        logger.warning("no OpenMP runtime in this process: kernels run on one thread")
        addresses: tuple[int | None, ...] = (None,) * len(_SYMBOLS)
    else:
        logger.info("kernels run on the OpenMP threads of %s", openmp.path)
        addresses = openmp.addresses
    launcher.tvm_ops_bind.argtypes = [ctypes.c_void_p] * 4
    launcher.tvm_ops_bind.restype = None
    launcher.tvm_ops_bind(*addresses, _address(ffi, "TVMFFIErrorSetRaisedFromCStr"))
    register = ffi.TVMFFIEnvModRegisterContextSymbol
    register.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    register.restype = ctypes.c_int
    for symbol, function in _CONTEXT_SYMBOLS.items():
        if register(symbol, _address(launcher, function)) != 0:
            raise RuntimeError(f"tvm-ffi refused to register {symbol.decode()}")


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None  # getattr raised otherwise
    return address


def _defining_file(address: int) -> str:
    info = _DlInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    found = dladdr(address, ctypes.byref(info))
    return info.dli_fname.decode() if found and info.dli_fname else "unknown"
