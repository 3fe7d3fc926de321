"""Settings of a daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["LOG", "QUIET", "Options"]

LOG: Final = "daemon.log"
"""Name of the daemon's log in the cache directory."""

QUIET: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of the daemon's processes: numpy's algebra library is not used, and is not to start a thread for each processor that waits by spinning."""


@dataclass(frozen=True, slots=True)
class Options:
    """``linger``: seconds an unused layer stays mounted; ``idle``: seconds without mounts after which the daemon ends (0: never); ``fetches``: segments fetched
    at once; ``deadline``: seconds after which a reader gets an error; ``limit``: bytes that segments may take on the disk (0: all there is; what mounted layers
    use is never removed); ``drop``: seconds after which the second copy of a fetched segment in the page cache is given back; ``direct``: mount with
    ``directio``, so that there is none; ``holes``: absent segments as holes even where empty files would do (cache/segments.py).
    """

    linger: float = 30.0
    idle: float = 300.0
    fetches: int = 16
    deadline: float = 60.0
    limit: int = 0
    drop: float = 15.0
    direct: bool = False
    holes: bool = False
