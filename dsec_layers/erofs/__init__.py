"""EROFS metadata images: ``writer.render`` a tree, ``reader.Image`` reads one, ``verify.compare`` proves one, ``dump.dump`` shows one. Bytes in, bytes out.

Face::

    columns  slices
    dump     dump
    overlay  is_device_whiteout, is_opaque, is_whiteout, opaque_name, OPAQUE_NAME, OPAQUE_XATTR, ORIGIN_XATTR,
             RESERVED_PREFIX, TRUSTED_PREFIX, USER_PREFIX, WHITEOUT_DEVICE, whiteout_name, WHITEOUT_PREFIX, without_overlay
    reader   Image
    tree     BLOCK, HOLE, Inode, show_path, Tree
    verify   compare
    writer   render
"""
