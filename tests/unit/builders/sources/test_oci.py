"""OCI layouts and Docker archives: choosing, verifying, merging; whatever is off is an error that names it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dsec_layers.builders.names import Limits
from dsec_layers.builders.sources import detect as detect_module
from dsec_layers.builders.sources.base import Source
from dsec_layers.builders.sources.detect import detect
from dsec_layers.builders.sources.image import Platform, parse_config, parse_docker, parse_index, parse_manifest
from dsec_layers.errors import CorruptError, DsecError, InputError, LimitError, NotFound, UsageError
from dsec_layers.fsio import pwrite_all
from tests.kit.oracle import MemorySink, Snapshot, diff, snapshot_tars, snapshot_tree
from tests.kit.tars import directory, file, hard_link, make_tar, symlink

LAYERS = [
    make_tar(directory("bin", mode=0o711), file("bin/sh", b"shell" * 100), file("etc/gone", b"secret"), file("etc/kept", b"kept")),
    make_tar(file("etc/.wh.gone"), file("bin/new", b"new"), hard_link("bin/sh2", "bin/sh")),
    make_tar(symlink("lib", "bin"), file("lib/via", b"via")),
]
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
EMPTY_GZIP = bytes.fromhex("1f8b080000096e88 00ff 621805a360148c5800080000ffff 2eafb5ef00040000".replace(" ", ""))
"""The canonical empty layer, a3ed95ca…: 1,024 zeros as Go's gzip writes them."""


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def descriptor(media_type: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(data), "size": len(data), **more}


class Layout:
    """An image layout being made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs/sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes) -> bytes:
        (self.root / "blobs/sha256" / hashlib.sha256(data).hexdigest()).write_bytes(data)
        return data

    def json(self, value: Any) -> bytes:
        return self.blob(json.dumps(value).encode())

    def manifest(self, stored: list[tuple[str, bytes]], tars: list[bytes], *, arch: str = "amd64", **changes: Any) -> bytes:
        settings = {"Env": ["PATH=/bin", "EMPTY=", "A=b=c", "BARE"], "WorkingDir": "/work", "User": "1000:1000"}
        config = self.json(
            {
                "os": "linux",
                "architecture": arch,
                "config": settings,
                "rootfs": {"type": "layers", "diff_ids": list(map(digest, tars))},
                **changes,
            }
        )
        layers = [descriptor(media_type, self.blob(data)) for media_type, data in stored]
        return self.json({"schemaVersion": 2, "config": descriptor("application/vnd.oci.image.config.v1+json", config), "layers": layers})

    def index(self, *items: dict[str, Any], name: str = "index.json") -> bytes:
        data = json.dumps({"schemaVersion": 2, "manifests": list(items)}).encode()
        (self.root / name).write_bytes(data)
        return data


def item(manifest: bytes, platform: str | None = None, **annotations: str) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if platform:
        more["platform"] = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
    if annotations:
        more["annotations"] = {key.replace("__", "."): value for key, value in annotations.items()}
    return descriptor("application/vnd.oci.image.manifest.v1+json", manifest, **more)


def image(layout: Layout, tars: list[bytes] = LAYERS, **changes: Any) -> bytes:
    return layout.manifest([(GZIP, gzip.compress(tar)) for tar in tars], tars, **changes)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def read(source: Source) -> Snapshot:
    sink = MemorySink()
    tree = source.ingest(sink)
    return snapshot_tree(tree, sink.content)


def pack(layout: Layout, path: Path, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        archive.add(layout.root, ".")
    return path


def test_b13_an_image_equals_its_layers(layout: Layout, tmp_path: Path) -> None:
    manifest = image(layout)
    layout.index(item(manifest))
    wanted = snapshot_tars(LAYERS)
    places: list[Any] = [layout.root, str(layout.root), pack(layout, tmp_path / "a.tar"), pack(layout, tmp_path / "a.tgz", "w:gz")]
    places += [io.BytesIO((tmp_path / "a.tar").read_bytes()), io.BytesIO((tmp_path / "a.tgz").read_bytes())]
    for place in places:
        source = detect(place)
        assert source.kind == "oci"
        assert diff(read(source), wanted) == []
        assert diff(read(source), wanted) == []  # and once more
        about = source.describe()
        assert (about["digest"], about["platform"]) == (digest(manifest), "linux/amd64") and len(about["layers"]) == 3
        config = source.image_config
        assert config is not None
        assert (config.env, config.workdir, config.user) == ({"PATH": "/bin", "EMPTY": "", "A": "b=c"}, "/work", "1000:1000")


def test_compressions_and_media_types(layout: Layout) -> None:
    stored = [
        ("application/vnd.oci.image.layer.v1.tar", LAYERS[0]),
        ("application/vnd.oci.image.layer.v1.tar+zstd", zstandard.compress(LAYERS[1])),
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", gzip.compress(LAYERS[2])),
    ]
    layout.index(item(layout.manifest(stored, LAYERS)))
    assert diff(read(detect(layout.root)), snapshot_tars(LAYERS)) == []


def test_b9_empty_layers(layout: Layout) -> None:
    assert digest(EMPTY_GZIP) == "sha256:a3ed95caeb02ffe68cdd9fd84406680ae93d633cb16422d00e8a7c22955b46d4"
    empty = bytes(1024)
    tars = [empty, make_tar(directory("only")), empty, b""]
    layout.index(
        item(layout.manifest([(GZIP, EMPTY_GZIP), (GZIP, gzip.compress(tars[1])), (GZIP, gzip.compress(empty)), (GZIP, b"")], tars))
    )
    assert read(detect(layout.root)).keys() == {b"", b"only"}
    layout.index(item(layout.manifest([(GZIP, EMPTY_GZIP)], [empty])))
    assert read(detect(layout.root)).keys() == {b""}
    layout.index(item(layout.manifest([], [])))
    assert read(detect(layout.root)).keys() == {b""}


def test_b15_attestations_are_skipped(layout: Layout) -> None:
    provenance = layout.json({"schemaVersion": 2, "config": {}, "layers": [{"mediaType": "application/vnd.in-toto+json"}]})
    attestation = item(provenance, "unknown/unknown", vnd__docker__reference__type="attestation-manifest")
    arm, amd = image(layout, LAYERS[:1], arch="arm64"), image(layout)
    nested = layout.json(
        {
            "schemaVersion": 2,
            "manifests": [item(provenance, "unknown/unknown"), attestation, item(arm, "linux/arm64/v8"), item(amd, "linux/amd64")],
        }
    )
    layout.index(descriptor("application/vnd.oci.image.index.v1+json", nested))
    assert diff(read(detect(layout.root)), snapshot_tars(LAYERS)) == []
    for platform in ("linux/arm64", "linux/arm64/v8"):
        assert diff(read(detect(layout.root, platform=platform)), snapshot_tars(LAYERS[:1])) == []
    with pytest.raises(NotFound, match="no image for linux/arm64/v7") as caught:
        detect(layout.root, platform="linux/arm64/v7")
    assert caught.value.hint == "it has: linux/amd64, linux/arm64/v8"


@pytest.mark.parametrize("count", [0, 2, 4])
def test_b15_a_count_of_diff_ids_that_does_not_match(layout: Layout, count: int) -> None:
    ids = [digest(b"%d" % number) for number in range(count)]
    layout.index(item(image(layout, rootfs={"type": "layers", "diff_ids": ids})))
    with pytest.raises(InputError, match=f"lists {count} diff IDs, but the manifest has 3 layers"):
        detect(layout.root)


def test_digests_are_verified(layout: Layout) -> None:
    layout.index(item(image(layout)))
    stored = gzip.compress(LAYERS[1])
    path = layout.root / "blobs/sha256" / hashlib.sha256(stored).hexdigest()
    good = path.read_bytes()
    # another valid gzip of another valid tar, and of the same one
    for other in (gzip.compress(make_tar(file("bin/evil", b"evil"))), gzip.compress(LAYERS[1], mtime=5, compresslevel=1)):
        path.write_bytes(other.ljust(len(good), b"\0"))
        with pytest.raises(CorruptError, match="layer 2 of 3"):
            read(detect(layout.root))
    path.write_bytes(good + b"\0")
    with pytest.raises(CorruptError, match="its descriptor says"):
        read(detect(layout.root))
    path.unlink()
    with pytest.raises(NotFound):
        read(detect(layout.root))


def test_diff_ids_are_verified(layout: Layout) -> None:
    layout.index(item(layout.manifest([(GZIP, gzip.compress(tar)) for tar in LAYERS], [LAYERS[0], LAYERS[2], LAYERS[1]])))
    with pytest.raises(CorruptError, match=r"layer 2 of 3 .* diff ID"):
        read(detect(layout.root))
    layout.index(item(layout.manifest([(GZIP, gzip.compress(LAYERS[0]))], [LAYERS[1]])))
    with pytest.raises(CorruptError, match=r"layer 1 of 1 .* diff ID"):
        read(detect(layout.root))


def test_documents_are_verified(layout: Layout) -> None:
    manifest = image(layout)
    layout.index(item(manifest))
    path = layout.root / "blobs/sha256" / hashlib.sha256(manifest).hexdigest()
    path.write_bytes(manifest.replace(b'"schemaVersion": 2', b'"schemaVersion": 2 '))
    with pytest.raises(CorruptError):
        detect(layout.root)


def test_a_layer_that_changes_between_its_readings(layout: Layout) -> None:
    layout.index(item(image(layout)))
    path = layout.root / "blobs/sha256" / hashlib.sha256(gzip.compress(LAYERS[0])).hexdigest()

    class Meddler(MemorySink):
        def whole(self, inode, data) -> None:  # type: ignore[no-untyped-def]
            super().whole(inode, data)
            last = layout.root / "blobs/sha256" / hashlib.sha256(gzip.compress(LAYERS[2])).hexdigest()
            last.write_bytes(gzip.compress(LAYERS[2].replace(b"via", b"VIA")).ljust(last.stat().st_size, b"\0")[: last.stat().st_size])

    assert path.exists()
    with pytest.raises(DsecError):
        detect(layout.root).ingest(Meddler())


def test_several_images_are_for_the_user_to_choose(layout: Layout) -> None:
    one, two = image(layout, LAYERS[:1]), image(layout, LAYERS[:2])
    ref = "org__opencontainers__image__ref__name"
    layout.index(item(one, **{ref: "one"}), item(two, **{ref: "two"}))
    with pytest.raises(UsageError) as caught:
        detect(layout.root)
    assert caught.value.hint == "choose one by its reference: one, two"
    assert diff(read(detect(layout.root, reference="one")), snapshot_tars(LAYERS[:1])) == []
    assert diff(read(detect(layout.root, reference=digest(two))), snapshot_tars(LAYERS[:2])) == []
    with pytest.raises(NotFound, match="no image 'three'"):
        detect(layout.root, reference="three")
    layout.index(item(one, **{ref: "one"}), item(one, **{ref: "also-one"}))
    assert diff(read(detect(layout.root)), snapshot_tars(LAYERS[:1])) == []


def test_the_platform_of_the_config_counts_if_the_index_has_none(layout: Layout) -> None:
    layout.index(item(image(layout, arch="riscv64")), item(image(layout, LAYERS[:1])))
    assert diff(read(detect(layout.root)), snapshot_tars(LAYERS[:1])) == []
    assert diff(read(detect(layout.root, platform="linux/riscv64")), snapshot_tars(LAYERS)) == []
    with pytest.raises(NotFound) as caught:
        detect(layout.root, platform="windows/amd64")
    assert caught.value.hint == "it has: linux/amd64, linux/riscv64"


def test_indexes_within_indexes_end_somewhere(layout: Layout) -> None:
    data = image(layout)
    entry = item(data)
    for depth in range(6):
        layout.index(entry)
        if depth <= 4:
            assert read(detect(layout.root))
        else:
            with pytest.raises(InputError, match="more than 4 deep"):
                detect(layout.root)
        nested = layout.json({"schemaVersion": 2, "manifests": [entry]})
        entry = descriptor("application/vnd.oci.image.index.v1+json", nested)


@pytest.mark.parametrize(
    ("media_type", "words"),
    [
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "not for distribution"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "not for distribution"),
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "not supported"),
        ("application/vnd.in-toto+json", "not supported"),
        ("", "not supported"),
    ],
)
def test_layers_that_are_no_tars_are_refused(layout: Layout, media_type: str, words: str) -> None:
    layout.index(item(layout.manifest([(media_type, gzip.compress(LAYERS[0]))], LAYERS[:1])))
    with pytest.raises(InputError, match=words):
        detect(layout.root)


# -- docker save


def docker(
    path: Path, layers: dict[str, bytes], *, repeat: dict[str, str] | None = None, config: Any = None, name: str | None = None
) -> Path:
    document = json.dumps(
        config
        or {"os": "linux", "architecture": "amd64", "config": {"Env": ["X=1"]}, "rootfs": {"diff_ids": list(map(digest, layers.values()))}}
    ).encode()
    config_name = name or hashlib.sha256(document).hexdigest() + ".json"
    listed = [repeat.get(key, key) if repeat else key for key in layers]
    manifest = [{"Config": config_name, "RepoTags": ["example:latest"], "Layers": listed}]
    entries = [file(key, data) for key, data in layers.items() if not (repeat and key in repeat)]
    entries += [symlink(link, "../" + next(iter(layers))) for link in (repeat or {}).values()]
    path.write_bytes(make_tar(*entries, file(config_name, document), file("manifest.json", json.dumps(manifest).encode())))
    return path


IDS = [f"{number:064x}" for number in range(3)]


def test_docker_archives(tmp_path: Path) -> None:
    path = docker(tmp_path / "d.tar", {f"{name}/layer.tar": tar for name, tar in zip(IDS, LAYERS, strict=True)})
    for place in (
        path,
        io.BytesIO(path.read_bytes()),
        io.BytesIO(gzip.compress(path.read_bytes())),
        io.BytesIO(zstandard.compress(path.read_bytes())),
    ):
        source = detect(place)
        assert source.kind == "docker"
        assert diff(read(source), snapshot_tars(LAYERS)) == []
        assert source.image_config is not None and source.image_config.env == {"X": "1"}
        assert source.describe()["layers"] == list(map(digest, LAYERS))
    assert detect(path, reference="example").kind == "docker"
    with pytest.raises(NotFound, match="no image 'other'"):
        detect(path, reference="other")
    with pytest.raises(NotFound, match="linux/arm64"):
        detect(path, platform="linux/arm64")


def test_docker_archives_with_links_between_layers(tmp_path: Path) -> None:
    layers = {f"{IDS[0]}/layer.tar": LAYERS[0], f"{IDS[1]}/layer.tar": LAYERS[0]}
    path = docker(tmp_path / "d.tar", layers, repeat={f"{IDS[1]}/layer.tar": f"{IDS[1]}/layer.tar"})
    assert diff(read(detect(path)), snapshot_tars(LAYERS[:1])) == []


def test_docker_archives_are_verified(tmp_path: Path) -> None:
    wrong = {"os": "linux", "architecture": "amd64", "rootfs": {"diff_ids": [digest(LAYERS[1])]}}
    layers = {f"{IDS[0]}.tar": LAYERS[0]}
    with pytest.raises(CorruptError, match="diff ID"):
        read(detect(docker(tmp_path / "1.tar", layers, config=wrong)))
    with pytest.raises(CorruptError, match="the digest it is named by"):
        detect(docker(tmp_path / "2.tar", layers, name="0" * 64 + ".json"))
    with pytest.raises(InputError, match="lists 0 diff IDs, but the manifest has 1 layers"):
        detect(docker(tmp_path / "3.tar", layers, config={"os": "linux"}))
    with pytest.raises(NotFound, match="has no 'missing'"):
        path = tmp_path / "4.tar"
        path.write_bytes(make_tar(file("manifest.json", b'[{"Config": "missing", "Layers": []}]')))
        detect(path)


def test_docker_archives_that_are_oci_layouts_too(layout: Layout, tmp_path: Path) -> None:
    manifest = image(layout)
    parsed = parse_manifest(manifest, "m")
    layout.index(item(manifest, io__containerd__image__name="docker.io/library/x:1"))
    names = [f"blobs/sha256/{blob.digest[7:]}" for blob in (parsed.config, *parsed.layers)]
    (layout.root / "manifest.json").write_text(json.dumps([{"Config": names[0], "RepoTags": ["x:1"], "Layers": names[1:]}]))
    path = pack(layout, tmp_path / "both.tar")
    assert detect(path).kind == "oci" and detect(path, reference="docker.io/library/x:1").kind == "oci"
    assert detect(path, reference="x:1").kind == "docker" and detect(path, kind="docker").kind == "docker"
    assert diff(read(detect(path, kind="docker")), snapshot_tars(LAYERS)) == []


# -- telling inputs apart


def test_detection(tmp_path: Path, layout: Layout) -> None:
    (tmp_path / "plain").mkdir()
    tar = tmp_path / "files.tar"
    tar.write_bytes(make_tar(file("index.json", b"{}"), file("other", b"x")))
    assert detect(tmp_path / "plain").kind == "directory" and detect(tar).kind == "tar"
    assert read(detect(tar)).keys() == {b"", b"index.json", b"other"}
    assert read(detect(io.BytesIO(tar.read_bytes()))).keys() == {b"", b"index.json", b"other"}
    assert read(detect(io.BytesIO(gzip.compress(tar.read_bytes())))).keys() == {b"", b"index.json", b"other"}
    assert read(detect(io.BytesIO(b""))).keys() == {b""}
    only = make_tar(directory("blobs"), directory("blobs/sha256"))  # names like an image's, but none
    assert read(detect(io.BytesIO(only))).keys() == {b"", b"blobs", b"blobs/sha256"}
    layout.index(item(image(layout)))
    assert detect(layout.root, kind="directory").kind == "directory"
    assert detect(pack(layout, tmp_path / "l.tar"), kind="tar").kind == "tar"
    for bad in ("tar", "docker"):
        with pytest.raises(UsageError):
            detect(layout.root, kind=bad)
    with pytest.raises(UsageError):
        detect(tar, kind="directory")
    with pytest.raises(UsageError, match="directories only"):
        detect(tar, excludes=["*.pyc"])
    with pytest.raises(UsageError, match="not a platform"):
        detect(tar, platform="linux")
    with pytest.raises(NotFound):
        detect(tmp_path / "none")
    with pytest.raises(InputError, match="no image index"):
        detect(tar, kind="oci")


# -- documents


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"null", b"{", b"[" * 100_000, b"{}", b'{"manifests": 5}', b'{"manifests": [5]}', b'{"manifests": [{}]}', b'{"manifests": [], "layers": []}',
     b'{"manifests": [{"digest": "sha256:00", "size": 1}]}', b'{"manifests": [{"digest": "sha512:%s", "size": 1}]}' % (b"0" * 128),
     b'{"manifests": [{"digest": "sha256:%s", "size": true}]}' % (b"0" * 64), b'{"manifests": [{"digest": "sha256:%s", "size": -1}]}' % (b"0" * 64),
     b'{"manifests": [{"digest": "sha256:%s", "size": 1, "platform": []}]}' % (b"0" * 64),
     b'{"manifests": [{"digest": "sha256:%s", "size": 1, "platform": {"os": 5}}]}' % (b"0" * 64),
     b'{"manifests": [{"digest": "sha256:%s", "size": 1, "annotations": {"a": 1}}]}' % (b"0" * 64),
     b'{"schemaVersion": 1, "layers": []}', b'{"schemaVersion": 2, "config": null}'],
)  # fmt: skip
def test_malformed_documents(text: bytes) -> None:
    if text not in (b"{}",) and b'"schemaVersion"' not in text:
        with pytest.raises(InputError):
            parse_index(text, "index")
    with pytest.raises(InputError):
        parse_manifest(text, "manifest")
    with pytest.raises(InputError):
        parse_config(text, 1, "config")
    if text not in (b"[]", b"null"):
        with pytest.raises(InputError):
            parse_docker(text, "manifest.json")


@pytest.mark.parametrize(
    "settings",
    [{"config": 5}, {"config": {"Env": "X=1"}}, {"config": {"Env": [5]}}, {"config": {"User": 5}}, {"config": {"WorkingDir": ["/"]}}, {"config": {"Cmd": "sh"}}, {"config": {"Entrypoint": [5]}}, {"config": {"Labels": {"a": 1}}},
     {"config": {"Labels": ["a"]}}, {"config": {"User": "\ud800"}}, {"config": {"Healthcheck": 5}}, {"config": {"x": float("nan")}}, {"history": {}}, {"history": [5]},
     {"created": 5}, {"config": {"StopSignal": 9}}, {"author": "\0"}, {"config": {"Labels": {"a": "x" * (5 << 20)}}}, {"os": 5},
     {"config": {"Env": ["A=\0"]}}, {"rootfs": []}, {"rootfs": {"diff_ids": [5]}}, {"rootfs": {"diff_ids": ["sha256:5"]}}],
)  # fmt: skip
def test_malformed_configs(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        parse_config(json.dumps({"rootfs": {"diff_ids": []}, **settings}).encode(), 1 if "rootfs" in settings else 0, "config")
    assert parse_config(b'{"config": null, "rootfs": {"diff_ids": null}}', 0, "config")[1] == ()


def test_platforms() -> None:
    assert str(Platform.parse("linux/arm/v7")) == "linux/arm/v7"
    assert Platform.parse("linux/arm").wants(Platform.parse("linux/arm/v6")) and not Platform.parse("linux/arm/v7").wants(
        Platform.parse("linux/arm/v6")
    )
    for bad in ("", "linux", "linux/", "a/b/c/d", "//"):
        with pytest.raises(UsageError):
            Platform.parse(bad)


class _Spool:
    """Counts what is written to the spool file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fds: list[int] = []
        self.written = 0
        monkeypatch.setattr(detect_module, "pwrite_all", self._write)

    def _write(self, fd: int, data: bytes, at: int) -> None:
        self.fds = self.fds or [os.dup(fd)]
        self.written += len(data)
        pwrite_all(fd, data, at)

    def left(self) -> int:
        """Bytes on disk."""
        sizes = [os.fstat(fd).st_blocks for fd in self.fds]
        for fd in self.fds:
            os.close(fd)
        return sum(sizes)


def bomb(size: int) -> bytes:
    """A compressed tar whose one entry, called like an image's layer, is zeros."""
    info = tarfile.TarInfo("0" * 64 + "/layer.tar")
    info.size = size
    compressor = zstandard.ZstdCompressor().compressobj()
    block = bytes(1 << 20)
    return compressor.compress(info.tobuf()) + b"".join(compressor.compress(block) for _ in range(size >> 20)) + compressor.flush()


@pytest.mark.parametrize(("size", "limits", "most"), [(700 << 20, None, 530 << 20), (300 << 20, Limits.of({"spool": 16 << 20}), 16 << 20)])
def test_b1_a_bomb_called_like_a_layer_is_not_spooled_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, limits: Limits | None, most: int
) -> None:
    spool = _Spool(monkeypatch)
    archive = tmp_path / "image.tar.zst"
    archive.write_bytes(bomb(size))
    assert archive.stat().st_size < 1 << 20
    with pytest.raises(LimitError, match=r"limit of a temporary copy, at the entry '0{64}/layer.tar'") as caught:
        detect(archive, limits=limits, spool=tmp_path)
    assert caught.value.hint is not None and "--limit spool=" in caught.value.hint
    assert most // 2 < spool.written <= most
    assert spool.left() == 0 and list(tmp_path.iterdir()) == [archive]


def test_b1_an_image_on_a_pipe_is_spooled_within_the_limit() -> None:
    data = make_tar(file("0" * 64 + "/layer.tar", bytes(4 << 20)), file("f" * 64 + ".json", b"{}"))
    with pytest.raises(LimitError, match="temporary copy"):
        detect(io.BytesIO(data), limits=Limits.of({"spool": 1 << 20}))
    source = detect(io.BytesIO(data), limits=Limits.of({"spool": 5 << 20}))  # as files: it is no image after all
    assert source.kind == "tar" and len(read(source)) == 4


def test_limits_go_by_name() -> None:
    assert Limits.of({}) == Limits()
    assert Limits.of({"entries": 5, "attributes": 7}) == Limits(inodes=5, attribute_bytes=7)
    for values in ({"inodes": 1}, {"entries": -1}):
        with pytest.raises(UsageError):
            Limits.of(values)
