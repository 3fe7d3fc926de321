"""Manifests and configs: what is written is read back the same, and what is malformed is refused with ImageError."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.errors import ImageError
from dsec_layers.layers import descriptor as d
from dsec_layers.layers.descriptor import Descriptor, Kind
from dsec_layers.layers.manifest import (
    FOREIGN,
    MAX_JSON,
    Environment,
    Layer,
    LayerConfig,
    canonical_json,
    parse_config,
    parse_environment,
    parse_layer,
    parse_object,
)

ONE, TWO, THREE, FOUR, FIVE = (sha256_digest(bytes([number])) for number in range(5))
LAYER = Layer(
    Kind.WORKSPACE,
    Descriptor(d.CONFIG, ONE, 100),
    Descriptor(d.METADATA, TWO, 2000),
    Descriptor(d.CHUNKS, THREE, 300),
    (Descriptor(d.SEGMENTS, FOUR, 4 << 30), Descriptor(d.SEGMENTS, FIVE, 5, {FOREIGN: "true"})),
)
CONFIG = LayerConfig(
    Kind.TOOLKIT,
    "tool",
    prefix="/opt/tool",
    env={"PATH": "/opt/tool/bin"},
    workdir="/",
    counts={"inodes": 7},
    parent=ONE,
    recipe={"from": ["a", {"b": None}]},
    builder="dsec-layers 0",
)


def test_a_layer_comes_back() -> None:
    assert parse_layer(LAYER.to_json()) == LAYER
    assert parse_object(LAYER.to_json()) == LAYER
    assert not LAYER.compressed
    assert [item.digest for item in LAYER.blobs()] == [ONE, TWO, THREE, FOUR, FIVE]


def test_a_compressed_layer_comes_back() -> None:
    layer = Layer(Kind.TOOLKIT, Descriptor(d.CONFIG, ONE, 100), Descriptor(d.EROFS, TWO, 2000))
    assert parse_layer(layer.to_json()) == layer
    assert layer.compressed


def test_an_environment_comes_back() -> None:
    environment = Environment(((Kind.BASE, Descriptor(d.MANIFEST, ONE, 1)), (Kind.TOOLKIT, Descriptor(d.MANIFEST, TWO, 2))))
    assert parse_environment(environment.to_json()) == environment
    assert parse_object(environment.to_json()) == environment


def test_a_config_comes_back() -> None:
    assert parse_config(CONFIG.to_json()) == CONFIG
    plain = LayerConfig(Kind.BASE)
    assert parse_config(plain.to_json()).to_json() == plain.to_json()


def test_spelling_does_not_matter_to_the_reader_but_is_one_for_the_writer() -> None:
    spelled = json.dumps(json.loads(LAYER.to_json()), indent=3, sort_keys=False).encode()
    assert parse_layer(spelled).to_json() == LAYER.to_json()


def changed(data: bytes, path: tuple[str | int, ...], value: Any) -> bytes:
    """JSON with one value replaced, or removed when ``value`` is ``...``."""
    tree = json.loads(data)
    at = tree
    for part in path[:-1]:
        at = at[part]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schemaVersion",), 1),
        (("artifactType",), d.ENVIRONMENT),
        (("artifactType",), ["x"]),
        (("config",), ...),
        (("config", "mediaType"), "application/json"),
        (("config", "digest"), "sha256:short"),
        (("config", "digest"), ONE + "\n"),
        (("config", "size"), -1),
        (("config", "size"), True),
        (("config", "size"), 1.5),
        (("config", "size"), 1 << 63),
        (("layers",), {}),
        (("layers",), []),
        (("layers", 0), "x"),
        (("layers", 0, "mediaType"), "application/vnd.unknown"),
        (("layers", 0, "mediaType"), d.SEGMENTS),
        (("layers", 1, "mediaType"), d.METADATA),
        (("layers", 1, "mediaType"), d.EROFS),
        (("layers", 2, "mediaType"), d.CHUNKS),
        (("layers", 2, "digest"), FIVE),
        (("layers", 3, "annotations"), {"x": 1}),
        (("layers", 3, "annotations"), ["x"]),
        (("annotations",), ...),
        (("annotations", "dev.dsec.kind"), "other"),
        (("annotations", "dev.dsec.kind"), ["base"]),
        (("annotations",), "\ud800"),
    ],
)
def test_malformed_layers_are_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(ImageError):
        parse_layer(changed(LAYER.to_json(), path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
        (("format",), ...),
        (("kind",), "other"),
        (("kind",), ["base"]),
        (("layout",), "tar"),
        (("layout",), ["segments"]),
        (("digests", "content"), "md5"),
        (("digests",), ...),
        (("features",), ["encryption"]),
        (("features",), "x"),
        (("env",), ["x"]),
        (("env", "A=B"), "c"),
        (("env", ""), "c"),
        (("env", "A"), "a\0b"),
        (("counts", "inodes"), -1),
        (("counts", "inodes"), True),
        (("counts", "inodes"), "7"),
        (("recipe",), ["x"]),
        (("prefix",), "opt/tool"),
        (("prefix",), "/opt/../etc"),
        (("prefix",), "/opt//x"),
        (("prefix",), "/opt/"),
        (("prefix",), "/a\0b"),
        (("workdir",), 7),
        (("parent",), "x"),
        (("name",), ["x"]),
        (("recipe", "x"), "\udcff"),
    ],
)
def test_malformed_configs_are_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(ImageError):
        parse_config(changed(CONFIG.to_json(), path, value))


def test_malformed_environments_are_refused() -> None:
    good = Environment(((Kind.BASE, Descriptor(d.MANIFEST, ONE, 1)),)).to_json()
    for path, value in (
        (("manifests",), []),
        (("manifests", 0, "mediaType"), d.CONFIG),
        (("manifests", 0, "annotations", "dev.dsec.kind"), "toolkit"),
        (("manifests", 0), 5),
        (("artifactType",), d.LAYER),
        (("schemaVersion",), 3),
    ):
        with pytest.raises(ImageError):
            parse_environment(changed(good, path, value))
    with pytest.raises(ImageError):
        parse_object(changed(good, ("artifactType",), "text/plain"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a":NaN}',
        b'{"a":1e999}',
        b"\xff\xfe{",
        b"[" * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b" " * (MAX_JSON + 1),
    ],
    ids=range(10),
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    for parse in (parse_object, parse_layer, parse_environment, parse_config):
        with pytest.raises(ImageError):
            parse(data)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": ["ä", None, True]}) == '{"a":["ä",null,true],"b":1}'.encode()
