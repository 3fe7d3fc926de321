"""From an input to a published layer, in rooms that build on one another::

    layerfile/   layer files: schema, steps, step cache, Debian bases
    sources/     tar, OCI, docker archive, directory: each becomes a tree and calls of a ContentSink
    output/      trees on their way out: a directory, a tar, an OCI image
    overlay/     names above names: whiteouts, opaque marks, merged views
    pack/        content to chunks, segments and a published layer

The modules beside the rooms are their common ground: the content sink, names and limits, excludes. ``unpacked`` puts any input into a directory.

Face::

    content   ContentSink
    excludes  Excludes
    names     apply_overrides, check_name, check_xattr, keeps_xattr, Limits, MAX_ID, MAX_PATH, memory_of, over_limit,
              Overrides, shown
    unpacked  unpacked
"""
