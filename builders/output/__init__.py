"""Trees on their way out: written into a directory, as a tar stream, or as an OCI image.

Face::

    directory  materialize
    oci        write_image
    tar        write_tar
"""
