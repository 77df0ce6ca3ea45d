"""Tiny random decoders of transformers, with a byte tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB_SIZE, HIDDEN_SIZE, CONTEXT = 264, 32, 256
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{{ '<end>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<end>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<end>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKS = ("<end>", "<|user|>", "<|assistant|>", "<|system|>")


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """Bytes and a few marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for mark in MARKS:
        vocab[mark] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=template
    ).save_pretrained(folder)


def write_llama(folder: Path) -> Path:
    """A Llama and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,  # the least that vLLM attends to on a CPU
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=256,
        eos_token_id=256,
        initializer_range=0.35,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    write_tokenizer(folder)
    return folder
