"""A digest that stands for a prompt, computed alike on both sides of a handoff.

A producer refuses a consumer whose prompt differs from the one it holds KV for, whatever
ids a router mixed up or replayed and whatever a client invented: the worst that wrong
ids can do is an error.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["drop_last_token", "prompt_digest"]

DIGEST_BYTES: Final = 16


def prompt_digest(request: Request) -> bytes:
    """16 bytes that differ when the KV caches of two prompts do.

    The tokens and the LoRA adapter, by name, decide what a KV cache holds, given that
    both servers run the same model, which their greeting checks.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    adapter = request.lora_request
    digest.update(f"{adapter.lora_name if adapter else ''}\0".encode())
    digest.update(f"{request.num_prompt_tokens}\0".encode())
    if request.prompt_token_ids is not None:
        digest.update(np.asarray(request.prompt_token_ids, dtype="<i8").tobytes())
    return digest.digest()


def drop_last_token(request: Request) -> None:
    """Makes a producer's request end one token early, before it is first scheduled."""
    if request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache():
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    elif request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
