"""config.v1.json: what does not fit is named; what is not known here is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsec_layers.errors import ImageError
from dsec_layers.overlaybd.config import LowerConfig, parse_config, render_config

GOOD: dict[str, Any] = {"repoBlobUrl": "u", "lowers": [{"file": "f", "size": 5, "own": 1}], "upper": {"data": "d", "vsize": 3}, "own": [1]}


def parse(**change: Any) -> Any:
    return parse_config(json.dumps(GOOD | change).encode())


def test_unknown_keys_are_kept() -> None:
    found = parse()
    assert (found.extra, found.lowers[0].extra) == ({"own": [1]}, {"own": 1})
    assert parse_config(render_config(found)) == found


@pytest.mark.parametrize("nothing", [None, {}])
def test_an_upper_may_be_empty(nothing: object) -> None:
    assert parse(upper=nothing).upper is None
    assert parse(lowers=[{"file": None}]).lowers == (LowerConfig(),)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"upper": ""}, "$.upper"), ({"upper": 0}, "$.upper"), ({"upper": False}, "$.upper"), ({"upper": []}, "$.upper"), ({"lowers": {}}, "$.lowers"),
        ({"lowers": [5]}, "$.lowers[0]"), ({"lowers": [{}, {"size": True}]}, "$.lowers[1].size"), ({"lowers": [{"size": -1}]}, "$.lowers[0].size"),
        ({"lowers": [{}] * 256}, "$.lowers"), ({"upper": {"vsize": 1 << 63}}, "$.upper.vsize"), ({"repoBlobUrl": 5}, "$.repo_blob_url"),
        ({"download": []}, "$.download"), ({"accelerationLayer": 1}, "$.acceleration_layer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises(ImageError, match=r"config\.v1\.json") as caught:
        parse(**change)
    assert f"`{where}`" in caught.value.message
