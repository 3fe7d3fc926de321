"""Which requests are refused, how errors are translated, how extents are tidied, what exports promise; wire forms byte by byte."""

from __future__ import annotations

import errno

import pytest

from dsec_layers import errors
from dsec_layers.blocksource import BlockSource, BytesSource, MemoryDisk
from dsec_layers.errors import UsageError
from dsec_layers.fuse.nbd import Export
from dsec_layers.fuse.nbd import protocol as nbd
from dsec_layers.fuse.nbd.exports import export_table
from dsec_layers.fuse.nbd.negotiation import Session
from dsec_layers.fuse.nbd.perform import tidy_extents
from dsec_layers.fuse.nbd.requests import Request, error_of, refusal

SIZE = 1 << 20


def session(*, disk: bool = True, structured: bool = True, allocation: bool = True, minimum: int = 1) -> Session:
    source: BlockSource = MemoryDisk(SIZE) if disk else BytesSource(bytes(SIZE))
    export = Export(source, minimum_block=minimum)
    return Session(export, SIZE, export.transmission_flags(structured=structured), structured, allocation)


def refused(command: int, offset: int = 0, length: int = 512, flags: int = 0, *, within: Session | None = None) -> int:
    answer = refusal(within or session(), Request(flags, command, 1, offset, length))
    return answer.error if answer else 0


def test_everything_within_the_rules_passes() -> None:
    for command in (nbd.NBD_CMD_READ, nbd.NBD_CMD_WRITE, nbd.NBD_CMD_TRIM, nbd.NBD_CMD_WRITE_ZEROES, nbd.NBD_CMD_BLOCK_STATUS):
        assert refused(command, 0, SIZE) == 0
        assert refused(command, SIZE - 1, 1) == 0
        assert refused(command, 0, 512, nbd.NBD_CMD_FLAG_FUA) == 0
    for command in (nbd.NBD_CMD_READ, nbd.NBD_CMD_WRITE, nbd.NBD_CMD_TRIM, nbd.NBD_CMD_WRITE_ZEROES):
        assert refused(command, SIZE, 0) == 0
    assert refused(nbd.NBD_CMD_FLUSH, 0, 0) == 0
    assert refused(nbd.NBD_CMD_FLUSH, 0, 0, nbd.NBD_CMD_FLAG_FUA) == 0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (nbd.NBD_CMD_READ, nbd.NBD_EINVAL),
        (nbd.NBD_CMD_WRITE, nbd.NBD_ENOSPC),
        (nbd.NBD_CMD_TRIM, nbd.NBD_EINVAL),
        (nbd.NBD_CMD_WRITE_ZEROES, nbd.NBD_ENOSPC),
        (nbd.NBD_CMD_BLOCK_STATUS, nbd.NBD_EINVAL),
    ],
)
def test_beyond_the_end(command: int, error: int) -> None:
    for offset, length in ((SIZE, 1), (SIZE - 1, 2), (1 << 63, 1), ((1 << 64) - 1, 1), ((1 << 64) - 1, (1 << 32) - 1)):
        assert refused(command, offset, length) == error


def test_read_only_exports_are_not_changed() -> None:
    image = session(disk=False)
    for command in (nbd.NBD_CMD_WRITE, nbd.NBD_CMD_TRIM, nbd.NBD_CMD_WRITE_ZEROES):
        assert refused(command, within=image) == nbd.NBD_EPERM
        assert refused(command, SIZE, 1, nbd.NBD_CMD_FLAG_FUA, within=image) == nbd.NBD_EPERM
    assert refused(nbd.NBD_CMD_FLUSH, 0, 0, within=image) == nbd.NBD_EINVAL
    assert refused(nbd.NBD_CMD_READ, flags=nbd.NBD_CMD_FLAG_FUA, within=image) == nbd.NBD_EINVAL


@pytest.mark.parametrize("command", [8, 9, 255, 65535])
def test_unknown_commands_and_resize(command: int) -> None:
    assert refused(command) == nbd.NBD_EINVAL


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        (nbd.NBD_CMD_READ, nbd.NBD_CMD_FLAG_DF),
        (nbd.NBD_CMD_WRITE, 0),
        (nbd.NBD_CMD_TRIM, 0),
        (nbd.NBD_CMD_WRITE_ZEROES, nbd.NBD_CMD_FLAG_NO_HOLE | nbd.NBD_CMD_FLAG_FAST_ZERO),
        (nbd.NBD_CMD_BLOCK_STATUS, nbd.NBD_CMD_FLAG_REQ_ONE),
    ],
)
def test_each_flag_has_its_commands(command: int, allowed: int) -> None:
    for bit in range(16):
        expected = 0 if 1 << bit & (allowed | nbd.NBD_CMD_FLAG_FUA) else nbd.NBD_EINVAL
        assert refused(command, flags=1 << bit) == expected


def test_df_needs_structured_replies() -> None:
    assert refused(nbd.NBD_CMD_READ, flags=nbd.NBD_CMD_FLAG_DF, within=session(structured=False)) == nbd.NBD_EINVAL


def test_flush_takes_no_range() -> None:
    assert refused(nbd.NBD_CMD_FLUSH, 1, 0) == refused(nbd.NBD_CMD_FLUSH, 0, 1) == nbd.NBD_EINVAL


def test_block_status_needs_a_context_and_a_length() -> None:
    assert refused(nbd.NBD_CMD_BLOCK_STATUS, within=session(allocation=False)) == nbd.NBD_EINVAL
    assert refused(nbd.NBD_CMD_BLOCK_STATUS, 0, 0) == nbd.NBD_EINVAL


def test_cache_is_for_sources_that_can() -> None:
    assert refused(nbd.NBD_CMD_CACHE) == nbd.NBD_EINVAL

    class Prefetching(BytesSource):
        def cache(self, offset: int, length: int) -> None:
            pass

    export = Export(Prefetching(bytes(SIZE)))
    flags = export.transmission_flags(structured=True)
    assert flags & nbd.NBD_FLAG_SEND_CACHE
    assert refused(nbd.NBD_CMD_CACHE, within=Session(export, SIZE, flags, True, True)) == 0


def test_alignment() -> None:
    coarse = session(minimum=512)
    assert refused(nbd.NBD_CMD_READ, 512, 1024, within=coarse) == 0
    assert refused(nbd.NBD_CMD_READ, 1, 512, within=coarse) == nbd.NBD_EINVAL
    assert refused(nbd.NBD_CMD_WRITE, 512, 100, within=coarse) == nbd.NBD_EINVAL


def test_payloads_over_32_mib() -> None:
    class Huge(MemoryDisk):
        def __init__(self) -> None:
            self.size = 1 << 40

    export = Export(Huge())
    for structured, error in ((True, nbd.NBD_EOVERFLOW), (False, nbd.NBD_EINVAL)):
        within = Session(export, 1 << 40, export.transmission_flags(structured=structured), structured, structured)
        assert refused(nbd.NBD_CMD_READ, 0, nbd.MAX_PAYLOAD, within=within) == 0
        assert refused(nbd.NBD_CMD_READ, 0, nbd.MAX_PAYLOAD + 1, within=within) == error
        assert refused(nbd.NBD_CMD_WRITE, 0, nbd.MAX_PAYLOAD + 1, within=within) == nbd.NBD_EINVAL
        assert refused(nbd.NBD_CMD_TRIM, 0, (1 << 32) - 1, within=within) == 0
        assert refused(nbd.NBD_CMD_WRITE_ZEROES, 0, (1 << 32) - 1, within=within) == 0


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EIO, ""), nbd.NBD_EIO),
        (OSError(errno.ENOSPC, ""), nbd.NBD_ENOSPC),
        (OSError(errno.EDQUOT, ""), nbd.NBD_ENOSPC),
        (OSError(errno.EFBIG, ""), nbd.NBD_ENOSPC),
        (OSError(errno.EPERM, ""), nbd.NBD_EPERM),
        (OSError(errno.EACCES, ""), nbd.NBD_EPERM),
        (OSError(errno.EROFS, ""), nbd.NBD_EPERM),
        (OSError(errno.EINVAL, ""), nbd.NBD_EINVAL),
        (OSError(errno.ENOMEM, ""), nbd.NBD_ENOMEM),
        (OSError(errno.ESHUTDOWN, ""), nbd.NBD_ESHUTDOWN),
        (OSError(errno.EOPNOTSUPP, ""), nbd.NBD_EIO),
        (TimeoutError(), nbd.NBD_EIO),
        (errors.NoSpace("x"), nbd.NBD_ENOSPC),
        (errors.UsageError("x"), nbd.NBD_EINVAL),
        (errors.Interrupted("x"), nbd.NBD_ESHUTDOWN),
        (errors.StoreError("x"), nbd.NBD_EIO),
        (errors.CorruptError("x"), nbd.NBD_EIO),
        (errors.NotFound("x"), nbd.NBD_EIO),
        (MemoryError(), nbd.NBD_ENOMEM),
        (ZeroDivisionError("secret"), nbd.NBD_EIO),
    ],
)
def test_errors_are_translated_and_keep_their_secrets(error: Exception, number: int) -> None:
    answer = error_of(error)
    assert answer.error == number
    assert "secret" not in answer.reason


def test_extents_are_tidied() -> None:
    assert tidy_extents([(10, 0), (5, 0), (3, 3), (100, 0)], 20, 9) == [(15, 0), (3, 3), (2, 0)]
    assert tidy_extents([(10, 0), (5, 3), (5, 0)], 20, 1) == [(10, 0)]
    assert tidy_extents([(10, 0)], 20, 9) == [(10, 0)]
    assert tidy_extents(((1, at % 2) for at in range(1 << 20)), 1 << 20, 7) == [(1, at % 2) for at in range(7)]
    for bad in ([], [(0, 0)], [(-1, 0)], [(5, 0), (0, 3)]):
        with pytest.raises(ValueError):
            tidy_extents(bad, 20, 9)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "n" * 4097},
        {"name": "a\0b"},
        {"description": "ü" * 2049},
        {"minimum_block": 3},
        {"minimum_block": 1 << 17, "preferred_block": 1 << 17},
        {"minimum_block": 0},
        {"preferred_block": 256},
        {"preferred_block": 1 << 26},
        {"minimum_block": 4096, "preferred_block": 1024},
        {"minimum_block": 8192, "preferred_block": 8192},
    ],
)
def test_exports_are_checked(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Export(BytesSource(bytes(4096)), **fields)  # type: ignore[arg-type]


def test_names_are_unique_and_there_is_one() -> None:
    image = Export(BytesSource(b""))
    with pytest.raises(UsageError):
        export_table([image, image])
    with pytest.raises(UsageError):
        export_table([])


def test_transmission_flags() -> None:
    disk = Export(MemoryDisk(512)).transmission_flags(structured=False)
    assert disk == 0b1001_0110_1101 & ~nbd.NBD_FLAG_SEND_DF | nbd.NBD_FLAG_CAN_MULTI_CONN
    image = Export(MemoryDisk(512), read_only=True).transmission_flags(structured=True)
    assert image == nbd.NBD_FLAG_HAS_FLAGS | nbd.NBD_FLAG_READ_ONLY | nbd.NBD_FLAG_SEND_DF | nbd.NBD_FLAG_CAN_MULTI_CONN


def test_wire_forms() -> None:
    assert nbd.greeting() == b"NBDMAGICIHAVEOPT\x00\x03"
    assert nbd.success_reply(7) == bytes.fromhex("67446698 00000000 0000000000000007")
    assert nbd.error_reply(7, 5, "no", structured=False) == bytes.fromhex("67446698 00000005 0000000000000007")
    assert nbd.error_reply(7, 5, "no", structured=True) == bytes.fromhex("668e33ef 0001 8001 0000000000000007 00000008 00000005 0002 6e6f")
    assert nbd.error_offset_chunk(7, 5, 9) == bytes.fromhex("668e33ef 0001 8002 0000000000000007 0000000e 00000005 0000 0000000000000009")
    assert nbd.data_header(7, 9, 3, structured=True) == bytes.fromhex("668e33ef 0001 0001 0000000000000007 0000000b 0000000000000009")
    assert nbd.data_header(7, 9, 3, structured=True, done=False)[4:6] == b"\0\0"
    assert nbd.done_chunk(7) == bytes.fromhex("668e33ef 0001 0000 0000000000000007 00000000")
    assert nbd.block_status_chunk(7, [(512, 3)]) == bytes.fromhex("668e33ef 0001 0005 0000000000000007 0000000c 00000001 00000200 00000003")
    with pytest.raises(nbd.ProtocolError):
        nbd.parse_client_flags(b"\0\0\0\x04")
    with pytest.raises(nbd.ProtocolError):
        nbd.parse_option(bytes(16))
