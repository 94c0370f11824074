"""Planning: which bytes of one paged cache go where in another.

Everything here is pure: numpy and msgspec in, numpy out, no clock, no thread, no
network. ``layout`` describes one side's cache, ``compat`` says whether two sides
may exchange KV at all, ``block_map`` pairs block ids by token position, ``build``
turns two layouts and two block tables into the arrays that the fabric takes.
"""
