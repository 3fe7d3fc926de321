"""The mount daemon as its users see it: ``host.open_host(cache)`` starts it if need be and gives a ``Host``; ``control`` is the protocol between the two.

Face::

    control        Message, VERSION
    controlserver  MessageServer, Reply
    host           CacheReport, Cleared, Host, HostPool, Mounted, open_host
    options        LOG, Options, QUIET
"""
