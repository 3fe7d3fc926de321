"""What is mounted on this host: each layer once, environments above them, and found again by the next worker from its records.

Face::

    aftermath  look_for_orphans, poisoned_folders, put_aside, remember_holes, warnings_of
    layers     LayerMounts, Mounter, Stores
    manager    Manager
"""
