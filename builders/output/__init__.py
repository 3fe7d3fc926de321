"""Trees on their way out: written into a directory, or as a tar stream.

Face::

    directory  materialize
    ocilayout  LayoutWriter
    tar        TarWriter
"""
