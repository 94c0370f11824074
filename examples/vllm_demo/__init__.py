"""A vLLM prefill and decode pair on this machine that moves its KV cache over the fabric.

The modules, in the order in which a run uses them: ``tiny_model`` and ``model`` make
something to serve, ``processes`` and ``servers`` start and stop what serves it,
``traffic`` sends prompts and reads counters, ``report`` shows what was seen.
The tests with model servers use the same modules.
"""
