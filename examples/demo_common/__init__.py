"""What the demos of all model servers stand on.

The modules, in the order in which a run uses them: ``tiny_model`` and ``model`` make
something to serve, ``processes`` and ``servers`` start and stop what serves it,
``traffic`` makes prompts, reads answers and counters, ``report`` shows what was seen, and
``command`` is the command line around them.  ``vllm_demo`` and ``sglang_demo`` hold only
what differs, and import nothing of each other.
"""
