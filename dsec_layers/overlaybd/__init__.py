"""OverlayBD disks: LSMT layers, ZFile compression, the tar around them, and the disk that is made of them.

Everything is a BlockSource in and bytes out; only ``upper`` works on files, through descriptors it is given. docs/formats/overlaybd.md describes the formats.
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
