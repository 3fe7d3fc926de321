"""On-demand front ends over the segment cache, in rooms::

    client/    the daemon as others see it: start it, ask it; its control protocol
    daemon/    the daemon's process: start, worker, service
    events/    fanotify: the keeper, and events in, answers out
    mounts/    what is mounted: layers, environments, the records of both
    server/    the FUSE driver: a layer as one file
    nbd/       the NBD protocol over any BlockSource

``records`` beside them is what daemon, client and server know of each other's leases and mounts.

Face::

    records  Holder, LayerUse, LeaseRecord, MountRecord, Records, source_of
"""
