"""The FUSE driver: each layer as one read-only file that is its flat image, and EROFS mounted on that file.

Face::

    mount  FlatMounter
"""
