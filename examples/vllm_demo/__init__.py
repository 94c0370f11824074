"""A vLLM prefill and decode pair on this machine that moves its KV cache over the fabric.

``model`` names the environment that makes the model, ``servers`` starts what serves it,
``traffic`` sends prompts and reads counters; the rest is ``demo_common``.  The tests with
vLLM servers use the same modules.
"""
