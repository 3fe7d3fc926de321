"""Disks for microVMs: sealed ones in a store, read lazily; writable ones in a local directory; and how one becomes the other.

The formats are overlaybd's, the protocol towards the guest is fuse/nbd's; here is what a disk is between the two.

Face::

    attach  export_of, serve_disk, SOCKET
    ext4    make_ext4, make_image, size_for
    files   check_size, create_files, DiskFiles, GenerationReader
    local   LocalDisk
    opener  open_pieces
    owner   owner_of, served
    source  MINIMUM_BLOCK, ReadOnlySource
    state   DiskState, Parent, read_state, STATE
    stored  publish_disk, publish_file, publish_layer, StoredDisk
"""
