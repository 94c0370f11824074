"""The operator's tools. Each module named after a command holds that command's typer function.

Nothing here opens a socket or starts a thread: what a tool needs from the network it takes from
the engine, and what it needs from the machine it takes from a `Host` record.
"""
