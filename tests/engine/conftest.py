"""A tiny random float32 Llama, and plain and Medusa engines over it, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Read by vLLM at import: one process, a small cache, no binding of the shared test cores.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Workers of tensor-parallel engines are terminated in any case.
os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
# One thread: two that wait for each other crawl when anything else runs on a 2-core machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from safetensors.torch import save_file

VOCAB_SIZE = 288
HIDDEN_SIZE = 64
NUM_HEADS = 4
EOS_TOKEN_ID = 256
MARKS = {257: "<think>", 258: "</think>"}
"""Tokens by which reasoning parsers know where reasoning starts and ends."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random Llama with a byte-level tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-llama"))


def write_tiny_model(directory: Path) -> Path:
    """Make that Llama in `directory`, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        initializer_range=0.35,  # wide, so that greedy text wanders instead of repeating a token
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    for i in range(len(vocab), VOCAB_SIZE):
        vocab[MARKS.get(i, f"<extra_{i}>")] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(MARKS.values()))  # in texts too they are one token each
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"<extra_{EOS_TOKEN_ID}>"
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def random_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of random heads of the plain kind with the target's shared head."""
    return write_random_heads(tmp_path_factory.mktemp("random-heads"))


def write_random_heads(directory: Path) -> Path:
    """Make those heads in `directory`, and return it."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for head in range(NUM_HEADS):
        shape = (HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{head}.0.linear.weight"] = torch.randn(shape, generator=generator) * 0.1
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN_SIZE, generator=generator) * 0.1
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    config = {
        "medusa_num_heads": NUM_HEADS,
        "medusa_num_layers": 1,
        "version": "2",
        "max_position_embeddings": 8,  # says nothing of the target: heads have no positions
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


EngineMaker = Callable[..., Any]


@pytest.fixture(scope="module")
def make_engine(tiny_model: Path) -> Iterator[EngineMaker]:
    """Make `vllm.LLM` engines over the tiny model; all are shut down after the module."""
    with engine_maker(tiny_model) as make:
        yield make


@pytest.fixture
def make_brief_engine(tiny_model: Path) -> Iterator[EngineMaker]:
    """Like `make_engine`, but the engines are shut down after the test."""
    with engine_maker(tiny_model) as make:
        yield make


@contextmanager
def engine_maker(model: Path) -> Iterator[EngineMaker]:
    """Make `vllm.LLM` engines over `model`, all shut down at the end."""
    engines = []

    def make(**options: Any) -> Any:
        engines.append(start_engine(**{"model": model, **options}))
        return engines[-1]

    try:
        yield make
    finally:
        for engine in engines:
            engine.llm_engine.engine_core.shutdown()


def inspect_in_process(architecture: str) -> None:
    """Let vLLM look at a model class here: at first sight it starts a process for it, 15 seconds.

    Architectures that vLLM does not know are left to it.
    """
    from vllm import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    if known is not None:
        ModelRegistry.register_model(architecture, known.load_model_cls())


def start_engine(model: Path, **options: Any) -> Any:
    """A `vllm.LLM` over `model` in this process; its owner shuts `engine_core` down."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "block_size": 32,
        "num_gpu_blocks_override": 512,  # engines of a module live side by side
        "seed": 0,
        "disable_log_stats": True,
        **options,
    }
    return LLM(**settings)
