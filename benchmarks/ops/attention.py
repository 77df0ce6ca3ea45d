"""tree_attention beside its rivals on one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from ops.machine import Limits
from ops.results import check_parity
from ops.rivals import Rival, TvmTreeAttention, sdpa, vllm_causal
from ops.shapes import AttentionShape
from ops.timing import Call, Record, Repeats, compare, time_pair
from tvm_ops import tree_attention
from tvm_ops.testing import AttentionCase, chain_masks, error_and_bound, make_case, tree_rows

BLOCK_SIZE = 128  # vLLM's default on CPUs
KINDS = (("vec", "bfloat16"), ("vec", "float32"), ("amx", "bfloat16"))
# About a second a call of TVM's scalar code; larger shapes would take the night.
TVM_MOST_FLOPS = 1.5e9


def measure_attention(
    shape: AttentionShape,
    isa: str,
    dtype: str,
    limits: Sequence[Limits],
    tvm_baseline: TvmTreeAttention,
    repeats: Repeats,
) -> Iterator[Record]:
    """One record for each number of threads in `limits`; raises ParityError without any number."""
    case = _chains(shape, isa, getattr(torch, dtype))
    for limit in limits:
        torch.set_num_threads(limit.threads)
        yield _measure(case, shape, isa, dtype, limit, tvm_baseline, repeats)


def _chains(shape: AttentionShape, isa: str, dtype: torch.dtype) -> AttentionCase:
    lens = [shape.rows] * shape.batch
    case = make_case(
        layout=isa,
        dtype=dtype,
        head_dim=shape.head_dim,
        lens=lens,
        contexts=[shape.context] * shape.batch,
        kv_heads=shape.kv_heads,
        group=shape.group,
        block_size=BLOCK_SIZE,
        masks=chain_masks(lens),
    )
    # vLLM multiplies weights of 0 with whatever is in the slots after the last token.
    case.kv_cache.nan_to_num_(0.0)
    return case


def _measure(
    case: AttentionCase,
    shape: AttentionShape,
    isa: str,
    dtype: str,
    limit: Limits,
    tvm_baseline: TvmTreeAttention,
    repeats: Repeats,
) -> Record:
    out = case.out.clone()

    def ours() -> None:
        tree_attention(
            case.query, case.kv_cache, out, case.batch, scale=case.scale, layout=case.layout
        )

    rivals: dict[str, Rival | str] = {"vllm": vllm_causal(case, isa)}
    rivals["sdpa"], rivals["sdpa_gather"] = sdpa(case, shape)
    rivals["tvm"] = _tvm(case, shape, dtype, limit.threads, tvm_baseline)
    # Not a number before every kernel of this shape has shown that it is right.
    parity = _parity(f"{shape}, {isa}, {dtype}", case, out, ours, rivals)
    compared: dict[str, Record] = {}
    for name, rival in rivals.items():
        if isinstance(rival, str):
            compared[name] = {"theirs_us": None, "reason": rival}
        else:
            compared[name] = compare(*time_pair(ours, rival.call, repeats)) | rival.notes
    seconds = 1e-6 * float(compared["vllm"]["ours_us"])  # type: ignore[arg-type]
    size = shape.kv_bytes(case.kv_cache.element_size())
    return {
        "isa": isa,
        "dtype": dtype,
        "threads": limit.threads,
        **asdict(shape),
        "ours_us": compared["vllm"]["ours_us"],
        "gflops": round(shape.flops / seconds / 1e9, 2),
        "kv_gbps": round(size / seconds / 1e9, 2),
        "fraction_of_fma_peak": round(shape.flops / seconds / 1e9 / limit.fma_gflops, 4),
        "fraction_of_read": round(size / seconds / 1e9 / limit.read_gbps(size), 4),
        "fraction_of_limit": round(limit.seconds(shape.flops, size) / seconds, 4),
        "parity": parity,
        "rivals": compared,
    }


def _tvm(
    case: AttentionCase,
    shape: AttentionShape,
    dtype: str,
    threads: int,
    tvm_baseline: TvmTreeAttention,
) -> Rival | str:
    """The rival, or why it is not measured."""
    if dtype != "float32":
        return "compared in float32: it sums in the element type"
    if threads != 1:
        return "its code is serial"
    if shape.flops > TVM_MOST_FLOPS:
        return f"more than {TVM_MOST_FLOPS:.2g} operations: a call would take seconds"
    return tvm_baseline.bind(case, shape)


def _parity(
    what: str, case: AttentionCase, out: Tensor, ours: Call, rivals: dict[str, Rival | str]
) -> Record:
    ours()
    mine = out[tree_rows(case.batch, len(out))].float()
    apart = {}
    for name, rival in rivals.items():
        if not isinstance(rival, str):
            rival.call()
            apart[name] = float((mine - rival.result().float()).abs().max())
    error, bound = error_and_bound(case, out)
    check_parity(what, error, bound, apart)
    return {"error": error, "bound": bound, "apart": apart}
