"""Runs the steps of a layer file, each in a sandbox on what came before, and keeps what each one changed.

A step's result is its writable layer in overlayfs form. Its key is made of everything that decides it: the layers and inputs below, the steps before, its command,
variables, user, directory, network, and the epoch; so equal steps on equal ground are run once on a host.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsec_layers.builders.layerfile.recipe import Step
from dsec_layers.builders.layerfile.stepcache import StepCache
from dsec_layers.errors import StepError
from dsec_layers.layers.manifest import canonical_json
from dsec_layers.progress import Progress
from dsec_layers.sandbox import Network, Outcome, RunSpec, Sandbox
from dsec_layers.sandbox.output import Collector

__all__ = ["Ground", "chain_key", "run_steps"]

_FORMAT: Final = 1
"""Part of every key: changed when what a step sees changes."""

_TAIL: Final = 16 << 10
_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class Ground:
    """What the first step stands on. ``lower`` gives directories, topmost first, and is called only if a step has to run. ``key``: names their content.
    ``env``: variables of every step."""

    lower: Callable[[], Sequence[Path]]
    key: str
    env: Mapping[str, str]


def chain_key(**parts: Any) -> str:
    """The hex SHA-256 of JSON values, for keys of the step cache."""
    return hashlib.sha256(canonical_json({"format": _FORMAT, **parts})).hexdigest()


def run_steps(
    steps: Sequence[Step],
    ground: Ground,
    cache: StepCache,
    *,
    state: Path,
    epoch: int | None,
    progress: Progress,
    environ: Mapping[str, str] | None = None,
) -> list[Path]:
    """Run the steps in order, or find their results; returns the writable layers, lowest first.

    ``state``: where sandboxes live while they run. ``environ``: the host's environment (see Sandbox). Raises StepError with the end of a failed step's output.
    """
    uppers: list[Path] = []
    key = ground.key
    for number, step in enumerate(steps, 1):
        env = _variables(step, ground, epoch)
        key = step_key(key, step, env)
        label = f"step {number}/{len(steps)}: {step.title()}"
        found = cache.get(key)
        if found is not None:
            progress.info(f"{label} (cached)")
        else:
            progress.info(label)
            spec = RunSpec(step.argv, env, step.workdir, step.user, network=step.network)
            with cache.new(key) as place:
                upper = place / "tree"
                upper.mkdir()
                _run(spec, [*reversed(uppers), *ground.lower()], upper, label, state, environ, progress)
            found = cache.get(key)
            assert found is not None
        uppers.append(found / "tree")
    return uppers


def step_key(previous: str, step: Step, env: Mapping[str, str]) -> str:
    """The key of a step after the one with the key ``previous``."""
    return chain_key(
        after=previous, argv=step.argv, env=env, workdir=step.workdir, user=step.user, network=str(step.network), machine=os.uname().machine
    )


def _variables(step: Step, ground: Ground, epoch: int | None) -> dict[str, str]:
    times = {} if epoch is None else {"SOURCE_DATE_EPOCH": str(epoch)}
    return {"DEBIAN_FRONTEND": "noninteractive", **times, **ground.env, **step.env}


def _run(
    spec: RunSpec, lower: Sequence[Path], upper: Path, label: str, state: Path, environ: Mapping[str, str] | None, progress: Progress
) -> None:
    output = Collector(_TAIL, tail=True, line=progress.debug)
    try:
        with Sandbox(spec, lower, state=state, upper=upper, environ=environ, stdout=output.fd, stderr=output.fd) as box:
            outcome = box.wait()
    finally:
        text = output.finish().decode(errors="replace")
    if outcome.code != 0:
        raise _failure(label, outcome, text, spec.network)


def _failure(label: str, outcome: Outcome, output: str, network: Network) -> StepError:
    lines = output.strip().splitlines()[-_SHOWN:]
    reason = f" ({outcome.reason})" if outcome.reason else ""
    shown = "".join(f"\n  {line}" for line in lines)
    hint = 'it had no network: network = "host" in the layer file gives it one' if network is Network.NONE else None
    return StepError(
        f"{label}\nfailed with exit code {outcome.code}{reason}" + (f"; the end of its output:{shown}" if lines else ""), hint=hint
    )
