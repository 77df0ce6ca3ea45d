"""What is concluded from the records: parity first, then the summary. Plain Python only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

RIVAL_TOLERANCE = 10  # times the bound of ours: their accuracy is not at issue, only the same work

Records = Sequence[Mapping[str, Any]]


class ParityError(RuntimeError):
    """A kernel was wrong, so there are no numbers."""


def check_parity(what: str, error: float, bound: float, apart: Mapping[str, float]) -> None:
    """Raise ParityError unless ours is within `bound`, and each rival within 10 times that of ours.

    bound: of tvm_ops.testing.error_and_bound. NaN fails.
    """
    if not error <= bound:
        raise ParityError(f"{what}: tree_attention is off by {error:.3g}, at most {bound:.3g}")
    for rival, difference in apart.items():
        if not difference <= RIVAL_TOLERANCE * bound:
            raise ParityError(
                f"{what}: {rival} is {difference:.3g} from tree_attention, at most "
                f"{RIVAL_TOLERANCE * bound:.3g}"
            )


def _ratios(records: Records, rival: str, **wanted: object) -> list[float]:
    """Times of ours over those of `rival`, where it was measured."""
    return [
        record["rivals"][rival]["ratio"]
        for record in records
        if "ratio" in (record["rivals"].get(rival) or {})
        and all(record[key] == value for key, value in wanted.items())
    ]


def _worst(values: Sequence[float]) -> float | None:
    return max(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _speedup(values: Sequence[float], choose: Any = max) -> float | None:
    """Of ratios ours / theirs: how many times faster ours is where it is least so."""
    return round(1 / choose(values), 3) if values else None


def summarise(
    attention: Records, compaction: Records, amx_missing: str | None, step_ms: float
) -> dict[str, Any]:
    """The figures of record. Ratios: time of ours over theirs; speed-ups: theirs over ours.

    amx_missing: why isa amx was not measured, if it was not.
    """
    amx, vec = _ratios(attention, "vllm", isa="amx"), _ratios(attention, "vllm", isa="vec")
    dtypes = sorted({record["dtype"] for record in attention if record["isa"] == "vec"})
    tvm, torch_sdpa = _ratios(attention, "tvm"), _ratios(attention, "sdpa")
    summary: dict[str, Any] = {
        "worst_ratio_vs_vllm_amx": _worst(amx),
        "worst_ratio_vs_vllm_amx_reason": None if amx else amx_missing or "no shape was measured",
        "median_ratio_vs_vllm_amx": _median(amx),
        "worst_ratio_vs_vllm_vec": _worst(vec),
        "median_ratio_vs_vllm_vec": _median(vec),
    }
    for dtype in dtypes:
        ratios = _ratios(attention, "vllm", isa="vec", dtype=dtype)
        summary[f"worst_ratio_vs_vllm_vec_{dtype}"] = _worst(ratios)
        summary[f"median_ratio_vs_vllm_vec_{dtype}"] = _median(ratios)
    summary |= {
        "min_speedup_vs_tvm_tree_attn_cpu": _speedup(tvm),
        "median_speedup_vs_tvm_tree_attn_cpu": _speedup(tvm, statistics.median),
        "min_speedup_vs_sdpa": _speedup(torch_sdpa),
        "median_speedup_vs_sdpa": _speedup(torch_sdpa, statistics.median),
        "min_speedup_vs_sdpa_gather_timed": _speedup(_ratios(attention, "sdpa_gather")),
    }
    return summary | _summarise_compaction(compaction, step_ms)


def _summarise_compaction(records: Records, step_ms: float) -> dict[str, Any]:
    # Speed relative to memcpy is its time over ours: 1 is as fast as memcpy.
    same = [1 / ratio for ratio in _ratios(records, "same_pieces")]
    rows = [1 / ratio for ratio in _ratios(records, "row_pieces")]
    shares = [
        (record["batch"], record["fraction_of_step"])
        for record in records
        if record["fraction_of_step"] is not None
    ]
    single = [share for batch, share in shares if batch == 1]
    return {
        "compaction_fraction_of_memcpy": round(min(same), 4) if same else None,
        "median_compaction_fraction_of_memcpy": _median(same),
        "compaction_fraction_of_memcpy_row_pieces": round(min(rows), 4) if rows else None,
        "compaction_share_of_step_batch_1": _worst(single),
        "compaction_share_of_step_worst": _worst([share for _, share in shares]),
        "step_ms": step_ms,
    }
