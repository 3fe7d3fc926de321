"""Disks for microVMs: sealed ones in a store, read lazily; writable ones in a local directory; and how one becomes the other.

The formats are overlaybd's, the protocol towards the guest is fuse/nbd's; here is what a disk is between the two.

Face::

    attach      attach, Attached, open_export, SOCKET
    background  start_server
    convert     OUTPUTS, publish_input, write_disk
    ext4        make_ext4, size_for
    files       check_size, create_files, DiskFiles, GenerationReader
    inputs      made_ext4, open_input
    owner       owner_of, served
    place       below, find_disk, opened, pieces, store_of
    sealing     check_format, FORMATS, fs_type_of, pack, pack_frozen, publish_as, Sealed
    state       Parent, read_state
    stored      StoredDisk
"""
