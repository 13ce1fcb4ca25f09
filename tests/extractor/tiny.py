"""A verifier of a few hundred kilobytes, made on the fly: byte-level tokenizer, ChatML, random Llama of 8 layers.

Responsible for being quick and for having every part a real model directory has. Leaves real activations to SmolLM2.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"]
N_LAYERS = 8
HIDDEN = 64


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """One token a byte, and the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def write_tiny_model(target: Path, *, seed: int = 0) -> Path:
    """Write config, weights and tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = byte_tokenizer()
        tokenizer.save_pretrained(target)
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer) + 3,  # 264
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_hidden_layers=N_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    return target


def conversations(n: int, *, longest: int = 120) -> list[dict[str, Any]]:
    """Chats of different lengths."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    out = []
    for i in range(n):
        answer = " ".join(words[(i + j) % len(words)] for j in range(1 + i * 7 % (longest // 7)))
        out.append(
            {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": answer[:longest]}]}
        )
    return out


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
