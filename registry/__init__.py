"""Objects by name: what refs and manifests say, the chunk catalog, copies between stores, verification, collection.

Reads and writes a store; mounts nothing and needs no root.

Face::

    catalog  Catalog, ChunkAt, Indexed, SegmentAt
    collect  GRACE, remove_ref, sweep, Sweep
    compare  Change, compare
    content  LayerContent, open_layer
    copy     Copied, copy_object
    flat     flat_image, write_flat
    fsck     judge
    objects  hold, load_chunks, load_config, load_disk, load_disk_config, load_layer, load_metadata, load_object,
             members_of, publish_object, put_blob, reach, resolve, resolve_any, set_tag
    refs     current, layer_before, swap_ref
    verify   repair, Report, verify
    view     Entry, open_view, walk
"""
