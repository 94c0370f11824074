"""The threads and sockets: everything here has an owner, named in its module's head.

control     the control thread, one per engine: sockets, sessions, timers
router      its two ROUTER sockets
sessions    its directory of peers
engine      the public engine; safe from any thread
job         one transfer; safe from any thread
rendezvous  names to addresses, ports to their holders
bootstrap   the HTTP registry that routers query, on a thread of its own
"""
