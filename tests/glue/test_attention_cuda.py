"""The CUDA backend's split of a batch, without a GPU: our kernels emulated, vLLM's replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from medusa_plugin.vllm_glue import attention_cuda
from medusa_plugin.vllm_glue.support import UnsupportedFeatureError
from tests.tvm_ops.emulated_cuda import emulated_program
from tvm_ops import TreeBatch, check_layout
from tvm_ops.gpu import attention
from tvm_ops.layouts import read_rows
from tvm_ops.testing import error_and_bound, make_case

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 2, 3, 64, 16


class PagedCausalAttention:
    """Plain torch in place of flash-attention; keeps the metadata it was called with."""

    def __init__(self) -> None:
        self.calls: list[FlashAttentionMetadata] = []

    def __call__(
        self,
        impl: Any,
        layer: Any,
        q: Any,
        k: Any,
        v: Any,
        cache: Any,
        metadata: Any,
        output: Any,
        *scales: Any,
    ) -> Any:
        self.calls.append(metadata)
        starts = metadata.query_start_loc.tolist()
        for i, length in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            count = starts[i + 1] - starts[i]
            position = torch.arange(length)
            slots = metadata.block_table[i, position // BLOCK].long() * BLOCK + position % BLOCK
            keys, values = (
                t.float().repeat_interleave(GROUP, 1) for t in read_rows(cache, "strided", slots)
            )
            seen = position[None] <= torch.arange(length - count, length)[:, None]
            logits = torch.einsum("rhd,phd->hrp", q[rows].float(), keys) * impl.scale
            weights = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
            output[rows] = torch.einsum("hrp,phd->rhd", weights, values).to(output.dtype)
        return output


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return {"directory": tmp_path_factory.mktemp("emulated")}


@pytest.fixture
def emulated(programs: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> PagedCausalAttention:
    def program(spec: Any, device: torch.device) -> Any:
        if spec not in programs:
            programs[spec], _ = emulated_program(spec, Path(programs["directory"]))
        return programs[spec]

    monkeypatch.setattr(attention, "cuda_program", program)
    monkeypatch.setattr(attention, "num_processors", lambda device: 4)
    plain = PagedCausalAttention()
    monkeypatch.setattr(
        FlashAttentionImpl, "forward", lambda self, *args, **kwargs: plain(self, *args, **kwargs)
    )
    return plain


def make_impl(window: int | None = None, **changes: Any) -> Any:
    impl = object.__new__(attention_cuda.TreeFlashAttentionImpl)
    vars(impl).update(attributes_of_impl(window, **changes))
    return impl


def attributes_of_impl(window: int | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "scale": HEAD_DIM**-0.5,
        "head_size": HEAD_DIM,
        "sliding_window": (-1, -1) if window is None else (window - 1, 0),
        "logits_soft_cap": 0,
        "alibi_slopes": None,
        "sinks": None,
        "kv_cache_dtype": "auto",
        **changes,
    }


def make_builder(cache: torch.Tensor, impl: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    builder = object.__new__(attention_cuda.TreeFlashAttentionMetadataBuilder)
    builder.layer_names = ["layer"]
    builder.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(max_model_len=300),
        num_speculative_tokens=40,
    )
    monkeypatch.setattr(
        attention_cuda,
        "get_layers_from_vllm_config",
        lambda config, kind, names: {"layer": SimpleNamespace(kv_cache=cache, impl=impl)},
    )
    return builder


@pytest.mark.parametrize("window", [None, 20])
def test_a_mixed_batch_is_split_between_both_kernels(window, emulated, monkeypatch):
    # Requests 0 and 2 have trees, 1 is a prefill chunk, 3 a plain decode.
    lens, contexts = [9, 7, 33, 1], [40, 3, 0, 17]
    case = make_case(
        layout="strided",
        dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        lens=lens,
        contexts=contexts,
        kv_heads=KV_HEADS,
        group=GROUP,
        block_size=BLOCK,
    )
    starts = np.cumsum([0, *lens]).astype(np.int32)
    query = torch.cat(
        [case.query[s : s + n] for s, n in zip(case.batch.query_start.tolist(), lens, strict=True)]
    )
    padded = torch.cat([query, torch.full((5, *query.shape[1:]), torch.nan, dtype=query.dtype)])
    trees = [0, 2]
    batch = TreeBatch(
        torch.from_numpy(starts[trees]),
        case.batch.query_len[trees],
        case.batch.context_len[trees],
        case.batch.ancestor_masks[trees],
        case.batch.block_table[trees].contiguous(),
    )
    metadata = FlashAttentionMetadata(
        num_actual_tokens=len(query),
        max_query_len=max(lens),
        query_start_loc=torch.from_numpy(starts),
        max_seq_len=max(c + n for c, n in zip(contexts, lens, strict=True)),
        seq_lens=case.batch.context_len + case.batch.query_len,
        block_table=case.batch.block_table,
        slot_mapping=torch.arange(len(query)),
    )
    impl = make_impl(window)
    builder = make_builder(case.kv_cache, impl, monkeypatch)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", lambda self, *args: metadata)
    ours = builder.build(0, None)
    output = torch.full_like(padded, torch.nan)
    tables = []
    for _ in range(2):  # the second step reuses the tables
        builder.attach_trees(ours, batch, [1, 3], starts)
        tables.append(ours.trees)
        impl.forward(None, padded, None, None, case.kv_cache, ours, output)
    assert tables[0] is tables[1]

    assert [call.query_start_loc.tolist() for call in emulated.calls] == [[0, 7, 8]] * 2
    assert emulated.calls[0].seq_lens.tolist() == [10, 18]
    assert output[len(query) :].isnan().all()
    whole = SimpleNamespace(
        query=query,
        kv_cache=case.kv_cache,
        out=output,
        batch=batch,
        scale=case.scale,
        options={"scale": case.scale, "layout": "strided", "sliding_window": window},
    )
    error, bound = error_and_bound(whole, output[: len(query)])
    assert error <= bound
    expected = torch.full_like(query, torch.nan)
    PagedCausalAttention()(impl, None, query, None, None, case.kv_cache, metadata, expected)
    plain = [*range(9, 16), 49]
    torch.testing.assert_close(output[plain], expected[plain])


def test_batches_without_trees_are_left_to_vllm(emulated):
    case = make_case(layout="strided", dtype=torch.bfloat16, head_dim=64, lens=[2], contexts=[5])
    output = case.out.clone()
    impl = make_impl()
    metadata = attention_cuda.TreeFlashAttentionMetadata(
        num_actual_tokens=2,
        max_query_len=2,
        query_start_loc=torch.tensor([0, 2]),
        max_seq_len=7,
        seq_lens=torch.tensor([7]),
        block_table=case.batch.block_table,
        slot_mapping=torch.arange(2),
    )
    impl.forward(None, case.query[1:3], None, None, case.kv_cache, metadata, output[1:3])
    assert emulated.calls == [metadata]


@pytest.mark.parametrize(
    "change, name",
    [
        ({"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({"sinks": torch.ones(4)}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "quantised KV cache"),
    ],
)
def test_layers_that_the_kernel_can_not_do_are_named(change, name, monkeypatch):
    impl = attention_cuda.TreeFlashAttentionImpl
    monkeypatch.setattr(
        attention_cuda.FlashAttentionImpl,
        "__init__",
        lambda self, **attributes: vars(self).update(attributes),
    )
    impl(**attributes_of_impl())
    with pytest.raises(UnsupportedFeatureError, match=name):
        impl(**attributes_of_impl(**change))


def test_the_layout_probe_reads_what_flash_attention_writes(monkeypatch):
    # do_kv_cache_update as in vLLM, its scatter kernel replaced by torch.
    def scatter(
        keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any, *rest: Any
    ) -> None:
        block, offset = slots // BLOCK, slots % BLOCK
        key_cache[block, offset] = keys
        value_cache[block, offset] = values

    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", scatter, raising=False)
    layer = SimpleNamespace(_k_scale=None, _v_scale=None)
    impl = make_impl(attn_type="decoder")

    def write(*tensors: torch.Tensor) -> None:
        impl.write_kv(layer, *tensors)

    check_layout(write, "strided", torch.bfloat16, head_dim=HEAD_DIM, block_size=BLOCK)
