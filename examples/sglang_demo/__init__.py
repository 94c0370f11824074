"""An SGLang prefill and decode pair on this machine that moves its KV cache with efa-kv.

``servers`` starts what serves and what is compared with it, ``traffic`` sends prompts and
reads counters; processes, prompts and the verdict are those of ``vllm_demo``.  The tests
with SGLang servers use the same modules.
"""
