"""Kernels for tree-shaped speculative decoding over vLLM's paged key-value caches.

Usable alone: imports neither vLLM nor medusa_plugin, and TVM itself only in a child process that
compiles. Names are imported on first use, so that the compiler does not drag torch in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_ops.attention import tree_attention
    from tvm_ops.compaction import KVCacheGroup, compact_kv
    from tvm_ops.gpu.tree_tables import TreeTables
    from tvm_ops.layouts import LAYOUTS, KVLayout
    from tvm_ops.load import start_warm_up, warm_up
    from tvm_ops.probe import check_layout
    from tvm_ops.tree_batch import MAX_TREE_ROWS, TreeBatch

__all__ = [
    "LAYOUTS",
    "MAX_TREE_ROWS",
    "KVCacheGroup",
    "KVLayout",
    "TreeBatch",
    "TreeTables",
    "check_layout",
    "compact_kv",
    "start_warm_up",
    "tree_attention",
    "warm_up",
]

_HOMES = {
    "KVCacheGroup": "compaction",
    "KVLayout": "layouts",
    "LAYOUTS": "layouts",
    "MAX_TREE_ROWS": "tree_batch",
    "TreeBatch": "tree_batch",
    "TreeTables": "gpu.tree_tables",
    "check_layout": "probe",
    "compact_kv": "compaction",
    "start_warm_up": "load",
    "tree_attention": "attention",
    "warm_up": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tvm_ops.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
