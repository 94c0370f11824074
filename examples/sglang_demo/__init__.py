"""An SGLang prefill and decode pair on this machine that moves its KV cache with efa-kv.

``model`` names the environment that makes the model, ``servers`` starts what serves and
what is compared with it, ``traffic`` sends prompts and reads counters; the rest is
``demo_common``.  The tests with SGLang servers use the same modules.
"""
