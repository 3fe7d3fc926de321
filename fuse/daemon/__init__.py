"""The mount daemon: ``python -m dsec_layers.fuse.daemon --cache DIR``. Starts, restarts, answers the control socket; what it does with layers is in mounts/ and events/."""
