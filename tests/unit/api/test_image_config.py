"""What an image says besides its layers: kept by import, composed by environments, set by layer files, shown, and written back by export."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec_layers import Session, build, env_create, export, import_source, inspect
from dsec_layers.api.mounts import run_spec
from dsec_layers.cli import main
from dsec_layers.errors import ImageError, UsageError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.layers.image import check_image, compose_image
from dsec_layers.layers.manifest import LayerConfig, parse_config
from tests.kit.tars import file, make_tar

SETTINGS: dict[str, Any] = {
    "User": "app:staff",
    "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
    "Env": ["PATH=/app/bin:/bin", "LANG=C", "A=1=2", "EMPTY=", "BARE"],
    "Entrypoint": ["/bin/serve", "--fast"],
    "Cmd": ["--port", "80"],
    "Volumes": {"/data": {}},
    "WorkingDir": "/app",
    "Labels": {"org.example.a": "é", "b": ""},
    "StopSignal": "SIGINT",
    "Healthcheck": {"Test": ["CMD", "true"], "Interval": 30_000_000_000, "Retries": 3},
    "Shell": ["/bin/bash", "-c"],
    "OnBuild": ["RUN true"],
    "ArgsEscaped": True,
    "x-unknown": [1, {"a": None}],
}
IMAGE: dict[str, Any] = {
    "created": "2024-05-01T12:00:00.123456789Z",
    "author": "Ann",
    "architecture": "arm64",
    "os": "linux",
    "variant": "v8",
    "os.version": "1",
    "docker_version": "20",
    "config": SETTINGS,
    "history": [
        {"created": "2024-05-01T12:00:00Z", "created_by": "ADD root /", "comment": "first"},
        {"created_by": "ENV A=1=2", "empty_layer": True},
        {"created_by": "COPY app /app"},
        {"created_by": "CMD", "empty_layer": True},
    ],
}
AS_ONE = [{**step, "empty_layer": True} if number == 0 else step for number, step in enumerate(IMAGE["history"])]
"""The history of the same image with its layers as one."""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path / "store", tmp_path / "cache") as opened:
        yield opened


def layout(root: Path, image: dict[str, Any], *tars: bytes) -> Path:
    """An OCI layout of an image with these layers."""
    blobs = root / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}

    rootfs = {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(tar).hexdigest() for tar in tars]}
    layers = [put(gzip.compress(tar), "layer.v1.tar+gzip") for tar in tars]
    config = put(json.dumps({**image, "rootfs": rootfs}).encode(), "config.v1+json")
    manifest = put(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode(), "manifest.v1+json")
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return root


def config_of(root: Path) -> dict[str, Any]:
    """The config of a layout's only image, without its rootfs, the count of whose layers the history has."""
    (entry,) = json.loads((root / "index.json").read_bytes())["manifests"]
    manifest = json.loads((root / "blobs/sha256" / entry["digest"][7:]).read_bytes())
    value: dict[str, Any] = json.loads((root / "blobs/sha256" / manifest["config"]["digest"][7:]).read_bytes())
    layers = value.pop("rootfs")["diff_ids"]
    assert sum(not step.get("empty_layer") for step in value["history"]) == len(layers) == len(manifest["layers"])
    return value


def layer(name: str, kind: Kind = Kind.WORKSPACE, *, env: dict[str, str] | None = None, workdir: str = "", **image: Any) -> LayerConfig:
    return LayerConfig(kind, name, env=env, workdir=workdir, image=image or None)


def test_import_and_export_lose_nothing(session: Session, tmp_path: Path) -> None:
    source = layout(tmp_path / "in", IMAGE, make_tar(file("a", b"1")), make_tar(file("b", b"2")))
    import_source(session, source, kind="base", name="a:1", platform="linux/arm64")
    export(session, "a:1", tmp_path / "out", format="oci")
    assert config_of(tmp_path / "out") == {**IMAGE, "history": AS_ONE}
    import_source(session, tmp_path / "out", kind="base", name="b:1", platform="linux/arm64")
    first, second = (inspect(session, name) for name in ("a:1", "b:1"))
    assert first.layers[0].image == second.layers[0].image == {**IMAGE, "history": AS_ONE}
    assert first.config == second.config == {**IMAGE, "history": AS_ONE}
    assert first.layers[0].env == second.layers[0].env == {"PATH": "/app/bin:/bin", "LANG": "C", "A": "1=2", "EMPTY": ""}
    export(session, "b:1", tmp_path / "again", format="oci")
    assert config_of(tmp_path / "again") == config_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("said", "kept"), [("/app/", "/app"), ("app", "/app"), ("/a/./b//c", "/a/b/c"), ("//x", "/x"), ("/../y", "/y"), ("", "")]
)
def test_working_directories_in_other_spellings_can_be_read_again(session: Session, tmp_path: Path, said: str, kept: str) -> None:
    source = layout(tmp_path / "in", {"architecture": "amd64", "os": "linux", "config": {"WorkingDir": said}}, make_tar(file("a", b"1")))
    import_source(session, source, kind="base", name="a:1")
    assert inspect(session, "a:1").config["config"]["WorkingDir"] == kept


def test_an_image_that_says_nothing_is_exported_with_a_history(session: Session, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    import_source(session, tmp_path / "tree", kind="base", name="a:1")
    assert inspect(session, "a:1").layers[0].image == {}
    export(session, "a:1", tmp_path / "out", format="oci")
    wanted = {"architecture": "amd64", "os": "linux", "config": {}, "history": [{"created_by": "dsec-layers base a:1"}]}
    assert config_of(tmp_path / "out") == wanted
    import_source(session, layout(tmp_path / "in", {"config": None, "history": None}, make_tar()), kind="base", name="b:1")
    assert inspect(session, "b:1").layers[0].image == {"config": {}, "history": [{"created_by": "dsec-layers import"}]}


def test_an_environment_composes_what_its_layers_say() -> None:
    base = layer("base:1", Kind.BASE, env={"PATH": "/bin", "A": "base"}, workdir="/", **IMAGE)
    work = layer("work:1", env={"A": "work"}, config={"User": "work", "Cmd": ["x"], "Env": ["A=old"]}, author="Bob")
    tool = layer("tool:1", Kind.TOOLKIT, workdir="/tool", config={"User": "", "Labels": {"t": "1"}, "Entrypoint": []})
    whole = compose_image([base, work, tool], {"PATH": "/bin:/usual", "A": "work", "B": "2"})
    assert whole["config"] == {
        **SETTINGS,
        "User": "work",
        "Cmd": ["x"],
        "Labels": {"t": "1"},
        "WorkingDir": "/tool",
        "Env": ["PATH=/bin", "A=work", "BARE", "B=2"],
    }
    assert (whole["author"], whole["variant"]) == ("Bob", "v8")
    assert whole["history"] == [*AS_ONE, {"created_by": "dsec-layers workspace work:1"}, {"created_by": "dsec-layers toolkit tool:1"}]
    path = compose_image([base, layer("work:1", env={"PATH": "/w"})], {"PATH": "/w:/bin:/usual"})["config"]["Env"]
    assert path[0] == "PATH=/w:/bin:/usual"


def test_an_entrypoint_takes_the_arguments_below_it_away() -> None:
    base = layer("base:1", Kind.BASE, config={"Entrypoint": ["a"], "Cmd": ["for a"]})
    whole = compose_image([base, layer("work:1", config={"Entrypoint": ["b"]})], {})
    assert whole["config"] == {"Entrypoint": ["b"]}


def test_an_environment_is_exported_with_the_history_of_each_layer(session: Session, tmp_path: Path) -> None:
    import_source(session, layout(tmp_path / "base", IMAGE, make_tar(file("a", b"1"))), kind="base", name="a:1", platform="linux/arm64")
    import_source(session, layout(tmp_path / "work", {"config": {"User": "w"}}, make_tar(file("b", b"1"))), kind="workspace", name="w:1")
    env_create(session, "e:1", base="a:1", workspace="w:1")
    export(session, "e:1", tmp_path / "out", format="oci")
    found = config_of(tmp_path / "out")
    assert (found["config"]["User"], found["config"]["Entrypoint"], len(found["history"])) == ("w", SETTINGS["Entrypoint"], 5)
    assert found == inspect(session, "e:1").config


def test_a_layer_file_sets_each(session: Session, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    recipe = tmp_path / "a.toml"
    recipe.write_text(
        'name = "a:1"\nkind = "base"\nworkdir = "/app"\n[source]\ntype = "dir"\npath = "tree"\n[env]\nA = "1"\n[image]\nuser = "app:staff"\n'
        'entrypoint = ["/bin/serve", "--fast"]\ncmd = "date"\nlabels = { "org.example.a" = "é", b = "" }\nports = ["80", "53/udp"]\n'
        'volumes = ["/data"]\nstop_signal = "SIGINT"\nshell = ["/bin/bash", "-c"]\nauthor = "Ann"\ncreated = "2024-05-01T12:00:00Z"\n'
        'history = ["one"]\nplatform = "linux/arm64/v8"\nhealthcheck = { test = "true", interval = "30s", timeout = "500ms", retries = 3 }\n'
    )
    build(session, recipe)
    assert inspect(session, "a:1").config == {
        **{key: IMAGE[key] for key in ("author", "architecture", "os", "variant")},
        "created": "2024-05-01T12:00:00Z",
        "history": [{"created_by": "one", "empty_layer": True}, {"created_by": "dsec-layers base a:1"}],
        "config": {
            **{
                key: SETTINGS[key]
                for key in ("User", "ExposedPorts", "Entrypoint", "Volumes", "WorkingDir", "Labels", "StopSignal", "Shell")
            },
            "Env": ["A=1"],
            "Cmd": ["/bin/sh", "-c", "date"],
            "Healthcheck": {"Test": ["CMD-SHELL", "true"], "Interval": 30_000_000_000, "Timeout": 500_000_000, "Retries": 3},
        },
    }


def test_a_layer_file_changes_what_its_source_says(session: Session, tmp_path: Path) -> None:
    layout(tmp_path / "in", IMAGE, make_tar(file("a", b"1")))
    recipe = tmp_path / "a.toml"
    text = (
        'name = "a:1"\nkind = "base"\n[source]\ntype = "oci"\npath = "in"\nplatform = "linux/arm64"\n[env]\nA = "2"\n[image]\nuser = "me"\n'
    )
    recipe.write_text(text)
    build(session, recipe)
    found = inspect(session, "a:1").config
    assert found["config"] == {**SETTINGS, "User": "me", "Env": ["PATH=/app/bin:/bin", "LANG=C", "A=2", "EMPTY=", "BARE"]}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("usr = 'x'", "did you mean 'user'"),
        ("user = 5", "image.user"),
        ("cmd = [5]", "image.cmd"),
        ("labels = { a = 1 }", "image.labels"),
        ("ports = ['x']", "'x' is not a port"),
        ("volumes = ['data']", "absolute"),
        ("created = 'yesterday'", "image.created"),
        ("created = '2024-05-01T12:00:00'", "image.created"),
        ("platform = 'arm'", "image.platform"),
        ("healthcheck = { interval = '30' }", "healthcheck.interval"),
        ("healthcheck = { retries = -1 }", "healthcheck.retries"),
        ("healthcheck = { tset = 'x' }", "did you mean 'test'"),
    ],
)
def test_mistakes_in_a_layer_file_are_named(session: Session, tmp_path: Path, line: str, word: str) -> None:
    recipe = tmp_path / "a.toml"
    recipe.write_text(f'name = "a:1"\nkind = "base"\n[source]\ntype = "dir"\npath = "."\n[image]\n{line}\n')
    with pytest.raises(UsageError) as caught:
        build(session, recipe)
    assert word in f"{caught.value.message} {caught.value.hint}"
    assert str(recipe) in caught.value.message


def test_a_run_is_as_the_image_says(session: Session, tmp_path: Path) -> None:
    import_source(session, layout(tmp_path / "base", IMAGE, make_tar(file("a", b"1"))), kind="base", name="a:1", platform="linux/arm64")
    spec = run_spec(session, "a:1", [])
    assert spec.argv == ("/bin/serve", "--fast", "--port", "80")
    assert (spec.user, spec.workdir, spec.stop_signal, spec.env["A"]) == ("app:staff", "/app", 2, "1=2")
    assert run_spec(session, "a:1", ["x"]).argv == ("/bin/serve", "--fast", "x")
    assert run_spec(session, "a:1", ["x"], entrypoint=["y"]).argv == ("y", "x")
    assert run_spec(session, "a:1", [], entrypoint=["y"]).argv == ("y",)
    assert run_spec(session, "a:1", ["x"], entrypoint=[]).argv == ("x",)
    with pytest.raises(UsageError, match="no command"):
        run_spec(session, "a:1", [], entrypoint=[])
    own = run_spec(session, "a:1", ["x"], user="0", workdir="/w", env={"A": "3"}, stop_signal=15)
    assert (own.user, own.workdir, own.stop_signal, own.env["A"]) == ("0", "/w", 15, "3")


def test_inspect_shows_it(session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_source(session, layout(tmp_path / "base", IMAGE, make_tar(file("a", b"1"))), kind="base", name="a:1", platform="linux/arm64")
    with pytest.raises(SystemExit):
        main(["--store", session.store_url, "--cache", str(session.cache), "inspect", "a:1"])
    shown = capsys.readouterr().out
    for line in (
        "platform linux/arm64/v8",
        "author Ann",
        "User app:staff",
        'Cmd ["--port", "80"]',
        "StopSignal SIGINT",
        "history COPY app /app",
    ):
        assert f"  {line}\n" in shown


@pytest.mark.parametrize("image", [5, {"config": 5}, {"config": {"User": 5}}, {"history": 5}, {"config": {"Labels": {"a": 5}}}])
def test_a_stored_config_is_checked_again(image: Any) -> None:
    value = json.loads(LayerConfig(Kind.BASE, image={"config": {}}).to_json())
    with pytest.raises(ImageError):
        parse_config(json.dumps({**value, "image": image}).encode())
    with pytest.raises(ImageError):
        check_image(image, "image")
    assert parse_config(json.dumps({**value, "image": IMAGE}).encode()).image == IMAGE
