"""kill -9 at every step, and processes that race on one ref."""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dsec_layers.digest import sha256_digest
from dsec_layers.proc import PIPE, Process, clean_environment, run, spawn
from dsec_layers.store.posix import PosixStore

ROOT = Path(__file__).resolve().parents[3]


def start(stack: ExitStack, url: str, who: str, count: int) -> Process:
    argv = [sys.executable, "-m", "tests.kit.store_racer", url, who, str(count)]
    return stack.enter_context(spawn(argv, stdout=PIPE, cwd=ROOT, env=clean_environment({"PYTHONDONTWRITEBYTECODE": "1"})))


def told(process: Process) -> list[tuple[str, str]]:
    """The swaps that a racer says it made."""
    assert process.stdout is not None
    lines = process.stdout.read().decode().splitlines(keepends=True)
    return [(line.split()[0], line.split()[1]) for line in lines if line.endswith("\n")]


@pytest.mark.slow
def test_killed_at_every_call_of_every_operation(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "tests.kit.store_crash", tmp_path / "store"], cwd=ROOT, timeout=120)
    points = {line.split()[0]: int(line.split()[1]) for line in done.stdout.decode().splitlines()}
    assert points.keys() == {"open", "put", "move", "make", "delete"}
    assert all(count >= 3 for count in points.values()), points


def test_two_processes_race_on_a_ref_and_no_swap_is_lost(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    with ExitStack() as stack:
        racers = [start(stack, store.url, who, 40) for who in ("one", "two")]
        swaps = [swap for racer in racers for swap in told(racer)]
        assert [racer.wait() for racer in racers] == [0, 0]
    follows = dict(swaps)
    assert len(swaps) == len(follows) == 80
    chain = ["None"]
    while chain[-1] in follows:
        chain.append(follows[chain[-1]])
    assert len(chain) == 81
    assert store.get_ref("race:1").digest == chain[-1]


def test_racers_that_are_killed_leave_a_ref_that_goes_on(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    store = PosixStore(tmp_path / "store")
    swaps: list[tuple[str, str]] = []
    for turn in range(6):
        with ExitStack() as stack:
            racers = [start(stack, store.url, f"{turn} {who}", 1000) for who in ("one", "two")]
            for racer in racers:
                assert racer.stdout is not None
                racer.stdout.peek(1)  # type: ignore[attr-defined]  # under way
            time.sleep(rng.uniform(0, 0.1))  # a random moment to kill at, nothing is waited for
            for racer in racers:
                racer.kill()
            swaps += [swap for racer in racers for swap in told(racer)]
        value = store.get_ref("race:1").digest
        assert store.stat(value).size
        for info in store.list():
            assert sha256_digest(store.read(info.digest, 0, info.size)) == info.digest
    follows = dict(swaps)
    assert len(follows) == len(swaps)  # nobody replaced the same value twice
    made = [int(path.name) for path in (store.root / "refs/race/1").iterdir()]
    assert sorted(made) == list(range(1, len(made) + 1))  # without a gap
    assert len(swaps) <= len(made) <= len(swaps) + 12  # a swap made but not told any more, at most one for each that was killed
    last = sha256_digest(b"last")
    store.set_ref("race:1", last, expected=store.get_ref("race:1").digest)
    assert store.get_ref("race:1").digest == last
