"""Readers that the kernel stopped: the keeper holds the fanotify group, events come in, segments are asked for, answers go out.

Face::

    adopt   adopt_group
    keeper  become_keeper, EXIT_PARKED, EXIT_STOPPED, Hand, notify
    probe   fails_closed
    serve   EventServer
"""
