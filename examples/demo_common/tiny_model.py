"""Writes a model small enough to serve on one CPU core, with random weights.

Runs in vLLM's environment, as a script: ``tiny_model.py FOLDER llama|mla SEED``.
The tokenizer has one token per byte and no merges, so a prompt's length in tokens is
its length in characters, and a test can hit a block's edge on purpose.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCABULARY_SIZE = 320  # 256 bytes and the special tokens, rounded up to a multiple of 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

# Wide enough that what comes next depends on the whole context: with the usual small
# weights greedy decoding repeats one token, and a wrong KV cache would go unseen.
WEIGHT_DEVIATION = 0.08
OUTPUT_WEIGHT_DEVIATION = 0.2


def make_tokenizer() -> PreTrainedTokenizerFast:
    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    begin, end, padding = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=padding
    )
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
        "{% endfor %}assistant: "
    )
    return wrapped


def make_network(kind: str) -> torch.nn.Module:
    if kind == "llama":
        # Grouped-query attention: four query heads share each KV head.
        return LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=32))
    if kind == "mla":
        # Latent attention. vLLM's CPU kernel takes a latent of 512 + 64 and no other.
        # Every layer is dense: the first expert layer would come after the last one.
        return DeepseekV2ForCausalLM(
            DeepseekV2Config(
                **COMMON,
                num_key_value_heads=8,
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=32,
                v_head_dim=32,
                first_k_dense_replace=COMMON["num_hidden_layers"] + 1,
                moe_intermediate_size=64,
            )
        )
    raise SystemExit(f"found: kind {kind!r}; expected: llama or mla; what to do: name one of them")


def randomize(network: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() >= 2:
                deviation = OUTPUT_WEIGHT_DEVIATION if "lm_head" in name else WEIGHT_DEVIATION
                weight.normal_(0.0, deviation, generator=generator)


def main() -> None:
    folder, kind, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(folder)
    network = make_network(kind)
    randomize(network, seed)
    network.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
