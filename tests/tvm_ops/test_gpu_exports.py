"""Exported GPU kernels: their manifest, and the limits of Metal and WebGPU that text can show.

No Metal compiler exists for Linux, so what Metal's compiler would say stays unknown here.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.tvm_ops.gpu_call import build_kernels
from tests.tvm_ops.test_build import run
from tvm_ops.gpu.entries import entry_point
from tvm_ops.layouts import DTYPE_NAMES

SUFFIXES = {"opencl": ".cl", "metal": ".metal", "webgpu": ".wgsl"}
PLACES = {"opencl": "index", "metal": "buffer", "webgpu": "binding"}
SHARED = {
    "opencl": re.compile(r"__local (\w+) \w+\[(\d+)\];"),
    "metal": re.compile(r"threadgroup (\w+) \w+\[(\d+)\];"),
    "webgpu": re.compile(r"var<workgroup> \w+ : array<(\w+), (\d+)>;"),
}
BARRIERS = {"opencl": "barrier(", "metal": "threadgroup_barrier(", "webgpu": "workgroupBarrier("}
SIZES = {"long": 8, "int": 4, "float": 4, "i32": 4, "f32": 4}
# Bytes of shared memory, threads and buffers that every device of the language has.
LIMITS = {"opencl": (32768, 256, 64), "metal": (32768, 512, 31), "webgpu": (16384, 256, 8)}
# What TVM could declare: names of the kernels' variables that a language keeps for itself.
DECLARED = {
    "opencl": r"^ *(?:__local )?(?:int|uint|long|float|bool) (\w+)",
    "metal": r"^ *(?:thread |threadgroup )?(?:int|uint|long|float|bool) (\w+)",
    "webgpu": r"(?:\b(?:var|let)(?:<[^>]*>)? |^  )(\w+) ?: ",
}
RESERVED = {
    "opencl": "constant global half image kernel local pipe private quad read_only volatile",
    "metal": "constant device fragment half kernel metal thread threadgroup vertex visible",
    "webgpu": "active auto const filter final for from get handle interface layout "
    "macro match move mut new pass private precision public ref regardless resource restrict self "
    "set shared static target this type typedef union unless using virtual volatile where with",
}


@pytest.fixture(scope="module", params=SUFFIXES)
def exported(request, tmp_path_factory) -> tuple[str, Path, list[dict]]:
    """(language, directory, the manifest's kernels) of all dtypes and the widest head_dims."""
    out = tmp_path_factory.mktemp(request.param)
    build_kernels(request.param, list(DTYPE_NAMES.values()), [80, 256], out)
    return request.param, out, json.loads((out / "manifest.json").read_text())["kernels"]


def test_manifest_describes_the_files(exported):
    language, out, kernels = exported
    assert {path.name for path in out.iterdir()} == {"manifest.json"} | {k["file"] for k in kernels}
    assert [k["kernel"] for k in kernels].count("compact_kv") == 1
    names = {k["file"] for k in kernels}
    assert f"tree_attention-strided-bfloat16-80{SUFFIXES[language]}" in names
    assert f"combine-strided-float16-256{SUFFIXES[language]}" in names
    for kernel in kernels:
        content = (out / kernel["file"]).read_bytes()
        assert kernel["sha256"] == hashlib.sha256(content).hexdigest()
        assert kernel["layouts"] == ["strided"]
        assert kernel["dtype"] in (*DTYPE_NAMES.values(), "uint32")


def test_arguments_have_places_of_their_own(exported):
    language, _, kernels = exported
    for kernel in kernels:
        arguments = kernel["arguments"]
        places = [(a[PLACES[language]], a.get("offset")) for a in arguments]
        assert places == sorted(set(places), key=lambda place: (place[0], place[1] or 0))
        for argument in arguments:
            assert (argument["kind"] == "pointer") == ("elements" in argument)
            if argument["kind"] == "pointer":
                assert argument["meaning"]


def test_manifest_names_what_is_needed(tmp_path):
    done = run("--target", "webgpu", "--head-dim", "16", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["target"] == {"name": "webgpu"}
    assert manifest["versions"]["tvm"].startswith("0.27.")
    assert len(manifest["versions"]["kernel_sources"]) == 64
    attention, combine, compaction = manifest["kernels"]
    assert (attention["entry"], attention["threads"]) == ("tree_attention_kernel", 128)
    assert attention["grid"] == ["row_tiles * splits", "num_trees * kv_heads"]
    assert combine["grid"] == ["row_tiles * 4", "num_trees * kv_heads"]
    assert compaction["grid"] == ["kv_heads", "1"]
    (scale,) = (a for a in attention["arguments"] if a["name"] == "scale")
    assert (scale["kind"], scale["binding"], scale["offset"]) == ("float32", 8, 52)


def test_limits_of_every_device(exported):
    language, out, kernels = exported
    shared_limit, thread_limit, buffer_limit = LIMITS[language]
    for kernel in kernels:
        text = (out / kernel["file"]).read_text()
        shared = sum(SIZES[kind] * int(n) for kind, n in SHARED[language].findall(text))
        assert shared <= shared_limit
        assert (shared > 0) == (kernel["kernel"] == "tree_attention")
        assert kernel["threads"] <= thread_limit
        pointers = [a for a in kernel["arguments"] if a["kind"] == "pointer"]
        # Metal's struct of scalars takes a buffer, WebGPU's is a uniform one and counts apart.
        assert len(pointers) + (language == "metal") <= buffer_limit
        assert not re.search(r"\b(double|half|bfloat|f16|f64|i64|u64)\b|fp64|^enable", text, re.M)


def test_no_name_is_reserved(exported):
    language, out, kernels = exported
    for kernel in kernels:
        text = (out / kernel["file"]).read_text()
        names = set(re.findall(DECLARED[language], text, re.M))
        assert len(names) > 5
        assert not names & set(RESERVED[language].split())
        assert not [name for name in names if name == "_" or name.startswith("__")]


def test_barriers_are_reached_by_all_threads(exported):
    # Only inside the function and the loop over tiles, whose count is the same for a whole block.
    language, out, kernels = exported
    for kernel in kernels:
        open_blocks, barriers = [], 0
        for line in (out / kernel["file"]).read_text().splitlines():
            if BARRIERS[language] in line:
                barriers += 1
                around = [block for block in open_blocks if "tile < count" not in block]
                assert len(around) == 1, f"a barrier inside {around}"
            for _ in range(line.count("}")):
                if open_blocks:
                    open_blocks.pop()
            open_blocks += [line] * line.count("{")
        assert barriers == (6 if kernel["kernel"] == "tree_attention" else 0)


@pytest.mark.parametrize("language", SUFFIXES)
def test_text_without_one_entry_point_is_refused(language):
    with pytest.raises(ValueError, match="expected one entry point"):
        entry_point("", language)


def test_layouts_belong_to_processors(tmp_path):
    done = run("--target", "metal", "--layout", "vec", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "layout 'vec' is not for metal, which has strided" in done.stderr
    done = run("--layout", "strided", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "layout 'strided' is not for" in done.stderr
    done = run("--target", "vulkan", "--out", str(tmp_path))
    assert "unknown target 'vulkan'" in done.stderr
    assert "metal, webgpu" in done.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())
