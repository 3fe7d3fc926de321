"""Option haggling without a socket: what each option is answered with, in each TLS mode."""

from __future__ import annotations

import struct

import pytest

from dsec_layers.blocksource import BytesSource, MemoryDisk
from dsec_layers.fuse.nbd import Export, TlsMode
from dsec_layers.fuse.nbd import protocol as nbd
from dsec_layers.fuse.nbd.negotiation import Negotiation, Next
from tests.kit.nbd_client import export_query, meta_query

DISK = Export(MemoryDisk(1 << 20), "disk", "a disk")
IMAGE = Export(BytesSource(bytes(5000)), "image", minimum_block=1, preferred_block=65536)


def negotiation(*exports: Export, tls: TlsMode = TlsMode.OFF, fixed: bool = True, no_zeroes: bool = True) -> Negotiation:
    return Negotiation({export.name: export for export in exports or (DISK, IMAGE)}, tls, fixed=fixed, no_zeroes=no_zeroes)


def replies(answer: tuple[bytes, Next], option: int) -> list[tuple[int, bytes]]:
    data = answer[0]
    found = []
    while data:
        magic, echoed, kind, length = struct.unpack(">QIII", data[:20])
        assert (magic, echoed) == (0x3E889045565A9, option)
        found.append((kind, data[20 : 20 + length]))
        data = data[20 + length :]
    return found


def kinds(answer: tuple[bytes, Next], option: int) -> list[int]:
    return [kind for kind, _ in replies(answer, option)]


def test_list_names_the_exports_in_order() -> None:
    answer = negotiation().answer(nbd.NBD_OPT_LIST, b"")
    assert replies(answer, nbd.NBD_OPT_LIST) == [(2, b"\0\0\0\x04diska disk"), (2, b"\0\0\0\x05image"), (1, b"")]
    assert answer[1] is Next.OPTION


def test_list_with_data_is_invalid() -> None:
    assert kinds(negotiation().answer(nbd.NBD_OPT_LIST, b"x"), nbd.NBD_OPT_LIST) == [nbd.NBD_REP_ERR_INVALID]


def test_go_tells_size_flags_and_what_was_asked_for() -> None:
    state = negotiation()
    answer = state.answer(nbd.NBD_OPT_GO, export_query("image", nbd.NBD_INFO_NAME, nbd.NBD_INFO_DESCRIPTION, nbd.NBD_INFO_BLOCK_SIZE, 77))
    flags = nbd.NBD_FLAG_HAS_FLAGS | nbd.NBD_FLAG_READ_ONLY | nbd.NBD_FLAG_CAN_MULTI_CONN
    assert replies(answer, nbd.NBD_OPT_GO) == [
        (3, struct.pack(">HQH", 0, 5000, flags)),
        (3, b"\0\x01image"),
        (3, struct.pack(">HIII", 3, 1, 65536, 1 << 25)),
        (1, b""),
    ]
    assert answer[1] is Next.TRANSMISSION
    assert state.session is not None
    assert (state.session.export, state.session.size, state.session.structured) == (IMAGE, 5000, False)


def test_info_says_the_same_and_stays() -> None:
    state = negotiation()
    answer = state.answer(nbd.NBD_OPT_INFO, export_query("disk", nbd.NBD_INFO_DESCRIPTION))
    assert (3, b"\0\x02a disk") in replies(answer, nbd.NBD_OPT_INFO)
    assert answer[1] is Next.OPTION
    assert state.session is None


def test_unknown_export() -> None:
    state = negotiation()
    for option in (nbd.NBD_OPT_INFO, nbd.NBD_OPT_GO):
        assert kinds(state.answer(option, export_query("nope")), option) == [nbd.NBD_REP_ERR_UNKNOWN]
    assert state.answer(nbd.NBD_OPT_EXPORT_NAME, b"nope") == (b"", Next.CLOSE)
    assert state.answer(nbd.NBD_OPT_EXPORT_NAME, b"\xff") == (b"", Next.CLOSE)
    assert state.answer(nbd.NBD_OPT_EXPORT_NAME, None) == (b"", Next.CLOSE)


def test_the_empty_name_means_the_only_export() -> None:
    state = negotiation(DISK)
    answer = state.answer(nbd.NBD_OPT_INFO, export_query("", nbd.NBD_INFO_NAME))
    assert (3, b"\0\x01disk") in replies(answer, nbd.NBD_OPT_INFO)
    assert kinds(negotiation(DISK, IMAGE).answer(nbd.NBD_OPT_GO, export_query("")), nbd.NBD_OPT_GO) == [nbd.NBD_REP_ERR_UNKNOWN]


@pytest.mark.parametrize("no_zeroes", [True, False])
def test_export_name_with_and_without_the_zeroes(no_zeroes: bool) -> None:
    answer, then = negotiation(no_zeroes=no_zeroes).answer(nbd.NBD_OPT_EXPORT_NAME, b"disk")
    assert then is Next.TRANSMISSION
    assert answer[:8] == struct.pack(">Q", 1 << 20)
    assert answer[10:] == (b"" if no_zeroes else bytes(124))


def test_a_client_without_fixed_newstyle_has_one_option() -> None:
    assert negotiation(fixed=False).answer(nbd.NBD_OPT_EXPORT_NAME, b"disk")[1] is Next.TRANSMISSION
    with pytest.raises(nbd.ProtocolError):
        negotiation(fixed=False).answer(nbd.NBD_OPT_LIST, b"")


def test_unknown_and_oversized_options_are_answered() -> None:
    state = negotiation()
    assert kinds(state.answer(4711, b"abc"), 4711) == [nbd.NBD_REP_ERR_UNSUP]
    assert kinds(state.answer(nbd.NBD_OPT_GO, None), nbd.NBD_OPT_GO) == [nbd.NBD_REP_ERR_TOO_BIG]
    assert kinds(state.answer(11, b""), 11) == [nbd.NBD_REP_ERR_UNSUP]  # extended headers


def test_abort_is_acknowledged_whatever_it_carries() -> None:
    for data in (b"", b"junk", None):
        answer = negotiation().answer(nbd.NBD_OPT_ABORT, data)
        assert (kinds(answer, nbd.NBD_OPT_ABORT), answer[1]) == ([nbd.NBD_REP_ACK], Next.CLOSE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0",
        b"\xff\xff\xff\xffdisk\0\0",
        b"\0\0\0\x04disk",
        b"\0\0\0\x04disk\0",
        b"\0\0\0\x04disk\0\x01",
        b"\0\0\0\x04disk\0\0extra",
        b"\0\0\0\x02\xc3\x28\0\0",
        b"\0\0\0\x05di\0sk\0\0",
        struct.pack(">I", 4097) + b"n" * 4097 + b"\0\0",
    ],
)
def test_malformed_info_is_invalid(data: bytes) -> None:
    state = negotiation()
    for option in (nbd.NBD_OPT_INFO, nbd.NBD_OPT_GO):
        answer = state.answer(option, data)
        assert (kinds(answer, option), answer[1]) == ([nbd.NBD_REP_ERR_INVALID], Next.OPTION)
    assert state.session is None


def test_a_name_of_4096_bytes_is_looked_up() -> None:
    name = "n" * 4096
    state = negotiation(Export(BytesSource(b""), name))
    assert state.answer(nbd.NBD_OPT_GO, export_query(name))[1] is Next.TRANSMISSION


class TestMetadata:
    def prepared(self) -> Negotiation:
        state = negotiation()
        assert kinds(state.answer(nbd.NBD_OPT_STRUCTURED_REPLY, b""), nbd.NBD_OPT_STRUCTURED_REPLY) == [nbd.NBD_REP_ACK]
        return state

    def test_needs_structured_replies(self) -> None:
        for option in (nbd.NBD_OPT_LIST_META_CONTEXT, nbd.NBD_OPT_SET_META_CONTEXT):
            assert kinds(negotiation().answer(option, meta_query("disk")), option) == [nbd.NBD_REP_ERR_INVALID]

    def test_structured_replies_take_no_data(self) -> None:
        answer = negotiation().answer(nbd.NBD_OPT_STRUCTURED_REPLY, b"x")
        assert kinds(answer, nbd.NBD_OPT_STRUCTURED_REPLY) == [nbd.NBD_REP_ERR_INVALID]

    @pytest.mark.parametrize(
        ("queries", "listed", "selected"),
        [
            ((), True, False),
            (("base:",), True, False),
            (("base:allocation",), True, True),
            (("qemu:dirty-bitmap:x", "base:allocation"), True, True),
            (("qemu:",), False, False),
            (("base:other",), False, False),
        ],
    )
    def test_queries(self, queries: tuple[str, ...], listed: bool, selected: bool) -> None:
        for option, found, identifier in (
            (nbd.NBD_OPT_LIST_META_CONTEXT, listed, 0),
            (nbd.NBD_OPT_SET_META_CONTEXT, selected, nbd.ALLOCATION_ID),
        ):
            answer = replies(self.prepared().answer(option, meta_query("disk", *queries)), option)
            context = [(4, struct.pack(">I", identifier) + b"base:allocation")] if found else []
            assert answer == [*context, (nbd.NBD_REP_ACK, b"")]

    @pytest.mark.parametrize(
        "data",
        [
            meta_query("disk", "nocolon"),
            meta_query("disk", ":leaf"),
            meta_query("disk", "base:allocation")[:-1],
            meta_query("disk") + b"x",
            b"\0\0\0\x04disk\xff\xff\xff\xff",
            b"",
        ],
    )
    def test_malformed_queries_are_invalid_and_forget_the_selection(self, data: bytes) -> None:
        state = self.prepared()
        state.answer(nbd.NBD_OPT_SET_META_CONTEXT, meta_query("disk", "base:allocation"))
        assert kinds(state.answer(nbd.NBD_OPT_SET_META_CONTEXT, data), nbd.NBD_OPT_SET_META_CONTEXT) == [nbd.NBD_REP_ERR_INVALID]
        state.answer(nbd.NBD_OPT_GO, export_query("disk"))
        assert state.session is not None
        assert not state.session.allocation

    def test_the_selection_holds_for_its_export_only(self) -> None:
        for name, kept in (("disk", True), ("image", False)):
            state = self.prepared()
            state.answer(nbd.NBD_OPT_SET_META_CONTEXT, meta_query("disk", "base:allocation"))
            state.answer(nbd.NBD_OPT_GO, export_query(name))
            assert state.session is not None
            assert state.session.allocation is kept

    def test_unknown_export(self) -> None:
        for option in (nbd.NBD_OPT_LIST_META_CONTEXT, nbd.NBD_OPT_SET_META_CONTEXT):
            assert kinds(self.prepared().answer(option, meta_query("nope", "base:allocation")), option) == [nbd.NBD_REP_ERR_UNKNOWN]


class TestTls:
    def test_off_refuses(self) -> None:
        assert kinds(negotiation().answer(nbd.NBD_OPT_STARTTLS, b""), nbd.NBD_OPT_STARTTLS) == [nbd.NBD_REP_ERR_POLICY]

    @pytest.mark.parametrize("mode", [TlsMode.ON, TlsMode.REQUIRE])
    def test_start_once_and_without_data(self, mode: TlsMode) -> None:
        state = negotiation(tls=mode)
        assert kinds(state.answer(nbd.NBD_OPT_STARTTLS, b"x"), nbd.NBD_OPT_STARTTLS) == [nbd.NBD_REP_ERR_INVALID]
        assert state.answer(nbd.NBD_OPT_STARTTLS, b"")[1] is Next.TLS
        state.secured()
        answer = state.answer(nbd.NBD_OPT_STARTTLS, b"")
        assert (kinds(answer, nbd.NBD_OPT_STARTTLS), answer[1]) == ([nbd.NBD_REP_ERR_INVALID], Next.OPTION)
        assert state.answer(nbd.NBD_OPT_GO, export_query("disk"))[1] is Next.TRANSMISSION

    @pytest.mark.parametrize("option", [nbd.NBD_OPT_LIST, nbd.NBD_OPT_INFO, nbd.NBD_OPT_GO, nbd.NBD_OPT_STRUCTURED_REPLY, 4711])
    def test_require_refuses_clear_text(self, option: int) -> None:
        for data in (b"", export_query("disk"), None):
            answer = negotiation(tls=TlsMode.REQUIRE).answer(option, data)
            assert (kinds(answer, option), answer[1]) == ([nbd.NBD_REP_ERR_TLS_REQD], Next.OPTION)

    def test_require_ends_an_export_name_and_lets_abort(self) -> None:
        assert negotiation(tls=TlsMode.REQUIRE).answer(nbd.NBD_OPT_EXPORT_NAME, b"disk") == (b"", Next.CLOSE)
        assert negotiation(tls=TlsMode.REQUIRE).answer(nbd.NBD_OPT_ABORT, b"")[1] is Next.CLOSE
        with pytest.raises(nbd.ProtocolError):
            negotiation(tls=TlsMode.REQUIRE, fixed=False)

    def test_on_serves_clear_text_too(self) -> None:
        assert negotiation(tls=TlsMode.ON).answer(nbd.NBD_OPT_GO, export_query("disk"))[1] is Next.TRANSMISSION

    def test_what_was_agreed_in_clear_text_is_forgotten(self) -> None:
        state = negotiation(tls=TlsMode.ON)
        state.answer(nbd.NBD_OPT_STRUCTURED_REPLY, b"")
        state.answer(nbd.NBD_OPT_SET_META_CONTEXT, meta_query("disk", "base:allocation"))
        state.answer(nbd.NBD_OPT_STARTTLS, b"")
        state.secured()
        state.answer(nbd.NBD_OPT_GO, export_query("disk"))
        assert state.session is not None
        assert (state.session.structured, state.session.allocation) == (False, False)
        assert not state.session.flags & nbd.NBD_FLAG_SEND_DF


def test_a_stopping_server_lets_clients_only_abort() -> None:
    state = negotiation()
    state.stopping = True
    assert kinds(state.answer(nbd.NBD_OPT_GO, export_query("disk")), nbd.NBD_OPT_GO) == [nbd.NBD_REP_ERR_SHUTDOWN]
    assert state.answer(nbd.NBD_OPT_EXPORT_NAME, b"disk")[1] is Next.CLOSE
    assert kinds(state.answer(nbd.NBD_OPT_ABORT, b""), nbd.NBD_OPT_ABORT) == [nbd.NBD_REP_ACK]
