"""Errors as values: what is kept when one is told from further up."""

from __future__ import annotations

import json
import pickle

import pytest

from dsec_layers.cli.console import Console
from dsec_layers.digest import sha256_digest
from dsec_layers.errors import ImageCode, ImageError, LimitError
from dsec_layers.registry.objects import load_layer
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import put_bytes


def test_located_keeps_all_but_the_message() -> None:
    error = ImageError("cut short", code=ImageCode.TRUNCATED, hint="get it again")
    told = error.located("x.erofs")
    assert (type(told), str(told), told.message, told.code, told.hint) == (
        ImageError, "x.erofs: cut short", "x.erofs: cut short", ImageCode.TRUNCATED, "get it again",
    )  # fmt: skip
    assert error.message == "cut short"
    assert type(LimitError("too many").located("x")) is LimitError


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(ImageError("no", code=ImageCode.LIMIT, hint="h")))
    assert (error.message, error.code, error.hint) == ("no", ImageCode.LIMIT, "h")


def test_json_errors_tell_the_kind_of_image_error(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    digest = put_bytes(store, b"[]").digest
    assert digest == sha256_digest(b"[]")
    with pytest.raises(ImageError, match="expected `object`, got `array`") as caught:
        load_layer(store, digest)
    console = Console(as_json=True)
    console.error(caught.value)
    assert json.loads(capsys.readouterr().out)["code"] == "bad_encoding"
    console.error(LimitError("x"))
    assert "code" not in json.loads(capsys.readouterr().out)
