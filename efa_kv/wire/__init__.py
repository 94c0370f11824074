"""The control protocol without any input or output: messages and state machines.

Nothing here opens a socket, starts a thread or reads a clock: bytes come in and go
out as values, time is an argument, and what should happen is returned as data.
"""
