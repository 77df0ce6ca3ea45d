"""`python -m tvm_ops.build`: what it writes is what its manifest says, and it refuses clearly."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tvm_ops.c_call import CDriver, RecordedCall, compile_driver
from tvm_ops import KVCacheGroup
from tvm_ops.build import BuildError, kernels_for
from tvm_ops.reference import compact_kv_reference
from tvm_ops.targets import host_target


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tvm_ops.build", *options],
        env=environment or None,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A build of the smallest kernels for this machine."""
    out = tmp_path_factory.mktemp("built")
    done = run("--layout", "amx", "--dtype", "bfloat16", "--head-dim", "16", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "manifest.json")
    return out


def test_manifest_describes_the_libraries(built):
    manifest = json.loads((built / "manifest.json").read_text())
    assert manifest["target"]["name"] == host_target().name
    assert set(manifest["target"]["cpu_flags"]) == host_target().flags
    assert manifest["versions"]["tvm"].startswith("0.27.")
    launcher, attention, compaction = manifest["libraries"]
    assert launcher["op"] == "launcher"
    assert attention["entry"] == "__tvm_ffi_tree_attention"
    assert (attention["layouts"], attention["dtype"], attention["head_dim"]) == (
        ["amx"],
        "bfloat16",
        16,
    )
    assert {"name": "scale", "kind": "float32"} in attention["arguments"]
    assert compaction["arguments"][:2] == [
        {"name": "caches", "kind": "int64 tensor [num_layers]"},
        {"name": "source", "kind": "int64 tensor [num_moves]"},
    ]
    files = {path.name for path in built.iterdir()}
    assert files == {"manifest.json", *(entry["file"] for entry in manifest["libraries"])}
    for entry in manifest["libraries"]:
        content = (built / entry["file"]).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()


def test_built_libraries_run_by_their_manifest(built, tmp_path):
    manifest = json.loads((built / "manifest.json").read_text())
    launcher, _, compaction = manifest["libraries"]
    caches = [torch.randn(2, 1, 32, 64).bfloat16() for _ in range(2)]
    group = KVCacheGroup(caches, "amx")
    source, target = torch.tensor([40, 3]), torch.tensor([3, 9])
    expected = [cache.clone() for cache in caches]
    compact_kv_reference(expected, "amx", source, target)
    values = {
        "caches": group.addresses,
        "source": source,
        "target": target,
        "num_kv_heads": 1,
        "block_size": 32,
        "head_dim": 32,
    }
    call = RecordedCall([values[a["name"]] for a in compaction["arguments"]], caches, pointers=[0])
    driver = CDriver(compile_driver("gcc", tmp_path), built / launcher["file"])
    driver.call(built / compaction["file"], compaction["entry"], call, threads=2)
    assert all(map(torch.equal, caches, expected))
    assert not torch.equal(caches[0], caches[1])


def test_combinations():
    specs = kernels_for(["vec", "vec16", "amx"], ["float32", "bfloat16"], [64, 128])
    # vec16 shares vec's memory; amx holds no float32; one compaction per layout and element size.
    assert list(map(str, specs)) == [
        "tree_attention:vec:float32:64",
        "tree_attention:vec:float32:128",
        "tree_attention:vec:bfloat16:64",
        "tree_attention:vec:bfloat16:128",
        "tree_attention:amx:bfloat16:64",
        "tree_attention:amx:bfloat16:128",
        "compact_kv:vec:uint32:0",
        "compact_kv:vec:uint16:0",
        "compact_kv:amx:uint16:0",
    ]


@pytest.mark.parametrize(
    "wanted, message",
    [
        ((["neon"], ["float32"], [64]), "unknown KV-cache layout 'neon'"),
        ((["vec"], ["int8"], [64]), "unknown dtype 'int8': expected one of float32, "),
        ((["vec", "amx"], ["float32"], [64]), "layout 'amx' holds bfloat16: add"),
        ((["amx"], ["bfloat16", "float32"], [64]), "none of the layouts amx holds float32"),
        ((["vec"], ["float32"], [40]), "divisible by 16, got 40"),
    ],
)
def test_impossible_kernels_are_refused(wanted, message):
    with pytest.raises(BuildError, match=message):
        kernels_for(*wanted)


def test_failures_are_explained(tmp_path):
    done = run("--target", "pentium", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "unknown target 'pentium': expected one of sapphirerapids, " in done.stderr
    done = run("--out", "/proc/nowhere")
    assert done.returncode == 1
    assert "/proc/nowhere can't be written" in done.stderr
    other = "aarch64" if host_target().machine == "x86_64" else "x86-64"
    done = run("--target", other, "--out", str(tmp_path), PATH="/nonexistent")
    assert done.returncode == 1
    assert "-linux-gnu-gcc` on PATH" in done.stderr
    assert "apt-get install gcc-" in done.stderr
    assert not (tmp_path / "manifest.json").exists(), "a failed build looks complete"


def test_help_has_examples():
    assert "--target aarch64 --dtype bfloat16" in run("--help").stdout
