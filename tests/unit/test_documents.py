"""The one JSON decoder: what it lets through, and what its refusals say."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from dsec_layers.digest import is_digest
from dsec_layers.documents import DigestText, Natural, convert, decode, plain
from dsec_layers.errors import ImageCode, ImageError


class Inner(Struct, frozen=True, forbid_unknown_fields=True):
    digest: DigestText


class Outer(Struct, frozen=True):
    number: Natural
    items: Annotated[tuple[Inner, ...], Meta(max_length=2)] = ()
    more: Any = None


DIGEST = "sha256:" + "0" * 64


def read(data: bytes) -> Outer:
    return decode(data, Outer, "x.json", limit=200_000)


def test_values_come_back() -> None:
    value = Outer(5, (Inner(DIGEST),), {"a": [1 << 70, 1.10, None, "😀"]})
    data = json.dumps(plain(value)).encode()
    assert read(data) == value == convert(json.loads(data), Outer, "x")
    assert json.dumps(plain(read(data))).encode() == data
    for view in (bytearray(data), memoryview(data)):
        assert decode(view, Outer, "x", limit=1000) == value


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"number": True}, "$.number"), ({"number": 1.0}, "$.number"), ({"number": "1"}, "$.number"), ({"number": -1}, "$.number"),
        ({"number": 1 << 63}, "$.number"), ({"number": 1 << 200}, "$.number"), ({"number": None}, "$.number"), ({"items": {}}, "$.items"),
        ({"items": [{"digest": DIGEST}] * 3}, "$.items"), ({"items": [{"digest": DIGEST + "\n"}]}, "$.items[...].digest"),
        ({"items": [{"digest": DIGEST, "more": 1}]}, "more"), ({"items": [{}]}, "digest"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, Any], field: str) -> None:
    value = {"number": 1, "items": []} | change
    with pytest.raises(ImageError) as decoded:
        read(json.dumps(value).encode())
    with pytest.raises(ImageError) as converted:
        convert(value, Outer, "x.json")
    for caught in (decoded, converted):
        assert caught.value.message.startswith("x.json: ")
        assert field in caught.value.message or field.replace("...", "0") in caught.value.message
        assert caught.value.code is ImageCode.BAD_ENCODING


@pytest.mark.parametrize(
    "more",
    [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b'{"\\udcff": 1}', b"[" * 100_000, b"[" * 50_000 + b"]" * 50_000,
     b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"a\nb"', b"01", b"'a'", b"1} {", b"1, }"],
)  # fmt: skip
def test_what_is_no_json_is_refused(more: bytes) -> None:
    with pytest.raises(ImageError, match=r"^x\.json"):
        read(b'{"number": 1, "more": ' + more + b"}")
    with pytest.raises(ImageError):
        read(b"\xef\xbb\xbf" + b'{"number": 1}')


def test_size_is_looked_at_first() -> None:
    with pytest.raises(ImageError, match="over the limit of 200000") as caught:
        read(b" " * 200_001)
    assert caught.value.code is ImageCode.LIMIT


@pytest.mark.parametrize("text", [DIGEST, DIGEST + "\n", DIGEST.upper(), DIGEST[:-1], "x" + DIGEST, "sha512:" + "0" * 64, ""])
def test_a_digest_is_what_is_digest_says(text: str) -> None:
    if is_digest(text):
        assert convert({"digest": text}, Inner, "x").digest == text
    else:
        with pytest.raises(ImageError):
            convert({"digest": text}, Inner, "x")
