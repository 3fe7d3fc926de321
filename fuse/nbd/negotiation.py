"""Option haggling as a state machine: option data in, reply bytes and the next step out. No I/O.

Rules in the order of the protocol document: "TLS support" (NOTLS, SELECTIVETLS, FORCEDTLS are the modes off, on, require), "Option types",
"Metadata querying".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from dsec_layers.fuse.nbd.exports import Export
from dsec_layers.fuse.nbd.protocol import (
    ALLOCATION_CONTEXT,
    ALLOCATION_ID,
    MAX_PAYLOAD,
    NBD_INFO_BLOCK_SIZE,
    NBD_INFO_DESCRIPTION,
    NBD_INFO_NAME,
    NBD_OPT_ABORT,
    NBD_OPT_EXPORT_NAME,
    NBD_OPT_GO,
    NBD_OPT_INFO,
    NBD_OPT_LIST,
    NBD_OPT_LIST_META_CONTEXT,
    NBD_OPT_SET_META_CONTEXT,
    NBD_OPT_STARTTLS,
    NBD_OPT_STRUCTURED_REPLY,
    NBD_REP_ACK,
    NBD_REP_ERR_INVALID,
    NBD_REP_ERR_POLICY,
    NBD_REP_ERR_SHUTDOWN,
    NBD_REP_ERR_TLS_REQD,
    NBD_REP_ERR_TOO_BIG,
    NBD_REP_ERR_UNKNOWN,
    NBD_REP_ERR_UNSUP,
    NBD_REP_INFO,
    NBD_REP_META_CONTEXT,
    NBD_REP_SERVER,
    ProtocolError,
    export_name_reply,
    info_block_size,
    info_export,
    info_text,
    meta_context,
    option_reply,
    parse_export_query,
    parse_meta_query,
    parse_name,
    server_entry,
)

__all__ = ["Negotiation", "Next", "Session", "TlsMode"]


class TlsMode(StrEnum):
    """Whether clients must not, may or have to use TLS."""

    OFF = "off"
    ON = "on"
    REQUIRE = "require"


class Next(Enum):
    """What follows an option."""

    OPTION = auto()
    TLS = auto()
    TRANSMISSION = auto()
    CLOSE = auto()


@dataclass(frozen=True, slots=True)
class Session:
    """What was agreed on: the export, its size and flags as they were told, and the two extensions."""

    export: Export
    size: int
    flags: int
    structured: bool
    allocation: bool


class Negotiation:
    """One connection's option haggling."""

    def __init__(self, exports: Mapping[str, Export], tls: TlsMode, *, fixed: bool, no_zeroes: bool) -> None:
        if not fixed and tls is TlsMode.REQUIRE:
            raise ProtocolError("TLS is required and the client does not speak fixed newstyle")
        self._exports = exports
        self._tls = tls
        self._fixed = fixed
        self._no_zeroes = no_zeroes
        self._secure = False
        self._structured = False
        self._allocation_of: Export | None = None
        self.stopping = False
        self.session: Session | None = None

    def secured(self) -> None:
        """TLS is on: whatever was agreed on in clear text is forgotten."""
        self._secure = True
        self._structured = False
        self._allocation_of = None

    def answer(self, option: int, data: bytes | None) -> tuple[bytes, Next]:
        """The reply to an option and what follows. ``data`` is None when it was longer than MAX_OPTION and was skipped."""
        if option == NBD_OPT_EXPORT_NAME:
            return self._export_name(data)
        if not self._fixed:
            raise ProtocolError(f"option {option} from a client that does not speak fixed newstyle")
        if option == NBD_OPT_ABORT:
            return option_reply(option, NBD_REP_ACK), Next.CLOSE
        if self.stopping:
            return option_reply(option, NBD_REP_ERR_SHUTDOWN), Next.OPTION
        if option == NBD_OPT_STARTTLS:
            return self._start_tls(data)
        if self._clear_text_refused:
            return option_reply(option, NBD_REP_ERR_TLS_REQD), Next.OPTION
        if option == NBD_OPT_SET_META_CONTEXT:
            self._allocation_of = None
        if data is None:
            return option_reply(option, NBD_REP_ERR_TOO_BIG), Next.OPTION
        try:
            return self._dispatch(option, data)
        except ValueError as error:
            return option_reply(option, NBD_REP_ERR_INVALID, str(error).encode()), Next.OPTION

    @property
    def _clear_text_refused(self) -> bool:
        return self._tls is TlsMode.REQUIRE and not self._secure

    def _dispatch(self, option: int, data: bytes) -> tuple[bytes, Next]:
        if option in (NBD_OPT_INFO, NBD_OPT_GO):
            return self._info(option, data)
        if option == NBD_OPT_LIST:
            reply = self._list(data)
        elif option == NBD_OPT_STRUCTURED_REPLY:
            _expect_no_data(data)
            self._structured = True
            reply = option_reply(option, NBD_REP_ACK)
        elif option in (NBD_OPT_LIST_META_CONTEXT, NBD_OPT_SET_META_CONTEXT):
            reply = self._meta_context(option, data)
        else:
            reply = option_reply(option, NBD_REP_ERR_UNSUP)
        return reply, Next.OPTION

    def _start_tls(self, data: bytes | None) -> tuple[bytes, Next]:
        if self._tls is TlsMode.OFF:
            return option_reply(NBD_OPT_STARTTLS, NBD_REP_ERR_POLICY, b"TLS is off on this server"), Next.OPTION
        if data != b"" or self._secure:
            return option_reply(NBD_OPT_STARTTLS, NBD_REP_ERR_INVALID), Next.OPTION
        return option_reply(NBD_OPT_STARTTLS, NBD_REP_ACK), Next.TLS

    def _find(self, name: str) -> Export | None:
        """The export of that name; the empty name also means the only export there is."""
        if name == "" and len(self._exports) == 1:
            return next(iter(self._exports.values()))
        return self._exports.get(name)

    def _enter(self, export: Export) -> Session:
        flags = export.transmission_flags(structured=self._structured)
        allocation = self._allocation_of is export
        self.session = Session(export, export.source.size, flags, self._structured, allocation)
        return self.session

    def _export_name(self, data: bytes | None) -> tuple[bytes, Next]:
        """This option has no error reply: what cannot be had ends the connection."""
        if self._clear_text_refused or self.stopping or data is None:
            return b"", Next.CLOSE
        try:
            export = self._find(parse_name(data))
        except ValueError:
            return b"", Next.CLOSE
        if export is None:
            return b"", Next.CLOSE
        session = self._enter(export)
        return export_name_reply(session.size, session.flags, zeroes=not self._no_zeroes), Next.TRANSMISSION

    def _info(self, option: int, data: bytes) -> tuple[bytes, Next]:
        query = parse_export_query(data)
        export = self._find(query.name)
        if export is None:
            return option_reply(option, NBD_REP_ERR_UNKNOWN, b"there is no export of that name"), Next.OPTION
        infos = [info_export(export.source.size, export.transmission_flags(structured=self._structured))]
        if NBD_INFO_NAME in query.requests:
            infos.append(info_text(NBD_INFO_NAME, export.name))
        if NBD_INFO_DESCRIPTION in query.requests and export.description:
            infos.append(info_text(NBD_INFO_DESCRIPTION, export.description))
        if NBD_INFO_BLOCK_SIZE in query.requests:
            infos.append(info_block_size(export.minimum_block, export.preferred_block, MAX_PAYLOAD))
        reply = b"".join(option_reply(option, NBD_REP_INFO, info) for info in infos) + option_reply(option, NBD_REP_ACK)
        if option == NBD_OPT_INFO:
            return reply, Next.OPTION
        self._enter(export)
        return reply, Next.TRANSMISSION

    def _list(self, data: bytes) -> bytes:
        _expect_no_data(data)
        entries = [option_reply(NBD_OPT_LIST, NBD_REP_SERVER, server_entry(name, e.description)) for name, e in self._exports.items()]
        return b"".join(entries) + option_reply(NBD_OPT_LIST, NBD_REP_ACK)

    def _meta_context(self, option: int, data: bytes) -> bytes:
        if not self._structured:
            raise ValueError("metadata contexts need structured replies")
        query = parse_meta_query(data)
        export = self._find(query.name)
        if export is None:
            return option_reply(option, NBD_REP_ERR_UNKNOWN, b"there is no export of that name")
        setting = option == NBD_OPT_SET_META_CONTEXT
        wanted = ALLOCATION_CONTEXT in query.queries or (not setting and (not query.queries or "base:" in query.queries))
        if not wanted:
            return option_reply(option, NBD_REP_ACK)
        if setting:
            self._allocation_of = export
        context = meta_context(ALLOCATION_ID if setting else 0, ALLOCATION_CONTEXT)
        return option_reply(option, NBD_REP_META_CONTEXT, context) + option_reply(option, NBD_REP_ACK)


def _expect_no_data(data: bytes) -> None:
    if data:
        raise ValueError("this option takes no data")
