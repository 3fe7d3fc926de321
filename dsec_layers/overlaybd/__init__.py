"""OverlayBD disks: LSMT layers, ZFile compression, the tar around them, and the disk that is made of them.

Everything is a BlockSource in and bytes out, but for ``upper`` and ``upper_journal``: the writable layer is files by its nature, and works on descriptors
that its caller opened; it opens and names none. ``disk`` stacks it on read-only layers. docs/formats/overlaybd.md describes the formats.

Face::

    config        ImageConfig, lower_paths, LowerConfig, parse_config, render_config
    dump          dump, DumpKind
    lsmt          encode_entries, Flags, Header, MAX_LBA, NIL_UUID, SPACE
    oci           blob_info, BlobInfo, layer_descriptor
    packing       virtual_size
    segments      no_segments, SECTOR, Segments
    stream        batches
    tarwrap       looks_like_tar
    zfile_format  raw_crc32c
"""

from dsec_layers.overlaybd.disk import Disk, Extent
from dsec_layers.overlaybd.layer import LsmtLayer, open_layer, open_sparse, open_upper_pair
from dsec_layers.overlaybd.packing import Packing, commit, content_uuid, merge
from dsec_layers.overlaybd.stream import Write
from dsec_layers.overlaybd.upper import Recovery, Upper
from dsec_layers.overlaybd.zfile import BlockCache, ZFile
from dsec_layers.overlaybd.zfile_format import Algorithm
from dsec_layers.overlaybd.zfile_writer import ZFileOptions, zfile_writes

__all__ = [
    "Algorithm",
    "BlockCache",
    "Disk",
    "Extent",
    "LsmtLayer",
    "Packing",
    "Recovery",
    "Upper",
    "Write",
    "ZFile",
    "ZFileOptions",
    "commit",
    "content_uuid",
    "merge",
    "open_layer",
    "open_sparse",
    "open_upper_pair",
    "zfile_writes",
]
