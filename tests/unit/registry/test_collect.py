"""Garbage collection: what is needed stays, what is not goes after its grace, and a publisher beside it loses nothing."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.errors import CorruptError, NotFound, StoreError, UsageError
from dsec_layers.layers.descriptor import Kind
from dsec_layers.registry.collect import GRACE, referenced, remove_ref, sweep
from dsec_layers.registry.objects import publish_object, set_tag
from dsec_layers.registry.verify import orphans, verify
from dsec_layers.store.base import BlobInfo, BlobWriter, Ref, Store
from dsec_layers.store.memory import MemoryStore
from dsec_layers.store.transfer import put_bytes
from tests.kit.store_faulty import Fault, FaultyStore
from tests.kit.store_samples import Sample, content, make_environment, make_layer
from tests.kit.store_wrapper import Wrapper


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.offset = -3 * 24 * 3600  # what a test stores first is three days old
    return clock


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    return MemoryStore(clock=clock)


def have(store: Store) -> set[Digest]:
    return {info.digest for info in store.list()}


def parts(sample: Sample) -> set[Digest]:
    return {sample.digest, *(item.digest for item in sample.layer.blobs())}


def test_only_what_no_ref_reaches_goes(store: MemoryStore, clock: Clock) -> None:
    base = make_layer(store, {"a": content(1, 200_000)})
    tool = make_layer(store, {"t": content(2, 70_000)}, kind=Kind.TOOLKIT, borrow=base)
    loose = make_layer(store, {"l": content(3, 70_000)}, borrow=base)
    environment = make_environment(store, [base, tool])
    store.set_ref("env:1", environment, expected=None)
    orphan = put_bytes(store, b"orphan")
    clock.offset = 0
    young = put_bytes(store, b"young")
    assert referenced(store) == parts(base) | parts(tool) | {environment}
    assert {info.digest for info in orphans(store)} == (parts(loose) - parts(base)) | {orphan.digest, young.digest}
    planned = sweep(store, dry_run=True)
    assert have(store) >= parts(loose)
    done = sweep(store)
    assert (done.deleted, done.bytes, done.young, done.kept) == (planned.deleted, planned.bytes, 1, len(referenced(store)))
    assert {info.digest for info in done.deleted} == (parts(loose) - parts(base)) | {orphan.digest}
    assert done.bytes == sum(info.size for info in done.deleted)
    assert have(store) == referenced(store) | {young.digest}
    assert sweep(store).deleted == ()


def test_f8_what_is_shared_stays_until_the_last_is_gone(clock: Clock) -> None:
    for order in itertools.permutations(range(3)):
        store = MemoryStore(clock=clock)
        base = make_layer(store, {"a": content(1, 200_000)})
        branches = [make_layer(store, {"b": content(10 + number, 70_000)}, kind=Kind.DIFF, borrow=base) for number in range(3)]
        for number, branch in enumerate(branches):
            store.set_ref(f"branch:{number}", branch.digest, expected=None)
        for left, number in zip((2, 1, 0), order, strict=True):
            remove_ref(store, f"branch:{number}")
            clock.offset = 0
            sweep(store)
            clock.offset = -3 * 24 * 3600
            assert (base.own.digest in have(store)) == (left > 0)
            assert have(store) == referenced(store)
        assert have(store) == set()


def test_a_young_layer_without_a_name_keeps_its_old_blobs(store: MemoryStore, clock: Clock) -> None:
    sample = make_layer(store, {"a": content(1, 200_000)})
    environment = make_environment(store, [sample])
    clock.offset = 0
    store.touch(environment)
    assert sweep(store).deleted == ()
    clock.offset = -3 * 24 * 3600
    store.touch(environment)
    assert {info.digest for info in sweep(store).deleted} == parts(sample) | {environment}


def test_manifests_go_before_what_they_name(store: MemoryStore) -> None:
    sample = make_layer(store, {"a": content(1, 200_000)})
    environment = make_environment(store, [sample])
    deleted = [info.digest for info in sweep(store).deleted]
    assert deleted[:2] == [environment, sample.digest]


def test_mounted_objects_are_kept(store: MemoryStore) -> None:
    sample = make_layer(store, {"a": content(1, 200_000)})
    assert sweep(store, keep=[sample.digest]).deleted == ()
    with pytest.raises(CorruptError):
        sweep(store, keep=[sha256_digest(b"nothing")])


def test_nothing_is_deleted_when_what_a_ref_needs_is_unknown(store: MemoryStore) -> None:
    sample = make_layer(store, {"a": content(1, 200_000)})
    store.set_ref("a:1", sample.digest, expected=None)
    put_bytes(store, b"orphan")
    faulty = FaultyStore(store)
    faulty.add(Fault("read", error=StoreError("timed out"), when=lambda digest: digest == sample.digest))
    with pytest.raises(StoreError, match="timed out"):
        sweep(faulty)
    store.delete(sample.digest)
    with pytest.raises(CorruptError, match="a:1"):
        sweep(store)
    assert sha256_digest(b"orphan") in have(store)
    remove_ref(store, "a:1")
    sweep(store)
    assert have(store) == set()


def test_a_grace_that_is_too_short_is_refused(store: MemoryStore) -> None:
    put_bytes(store, b"orphan")
    with pytest.raises(UsageError):
        sweep(store, grace=60)
    assert len(sweep(store, grace=0, force=True).deleted) == 1


def test_remove_ref(store: MemoryStore) -> None:
    sample = make_layer(store, {"a": b"x"})
    store.set_ref("a:1", sample.digest, expected=None)
    assert remove_ref(store, "a:1") == Ref("a:1", sample.digest)
    with pytest.raises(NotFound):
        remove_ref(store, "a:1")


# F5: any interleaving of a collector and a publisher


class Turns:
    """Lets one of several actors go on by one store call at a time, in an order drawn from a seed."""

    def __init__(self, seed: int, actors: tuple[str, ...]) -> None:
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._waiting: set[str] = set()
        self._alive = set(actors)
        self._turn = ""

    def wait(self, actor: str) -> None:
        """Until it is this actor's turn to make a call."""
        with self._changed:
            self._waiting.add(actor)
            self._draw()
            self._changed.wait_for(lambda: self._turn == actor)
            self._waiting.discard(actor)
            self._turn = ""

    def leave(self, actor: str) -> None:
        """The actor is done."""
        with self._changed:
            self._alive.discard(actor)
            self._draw()

    def _draw(self) -> None:
        if not self._turn and self._waiting == self._alive and self._alive:
            self._turn = self._rng.choice(sorted(self._alive))
            self._changed.notify_all()


class Actor(Wrapper):
    """A store each of whose calls waits for its turn."""

    def __init__(self, inner: Store, turns: Turns, name: str) -> None:
        super().__init__(inner)
        self._turns = turns
        self._name = name

    def _step(self) -> None:
        self._turns.wait(self._name)

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        self._step()
        return super().read(digest, offset, length)

    def writer(self) -> BlobWriter:
        self._step()
        return super().writer()

    def touch(self, digest: Digest) -> BlobInfo:
        self._step()
        return super().touch(digest)

    def delete(self, digest: Digest, *, older_than: float | None = None) -> bool:
        self._step()
        return super().delete(digest, older_than=older_than)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        self._step()
        return super().list(prefix)

    def set_ref(self, name: str, new: Digest | None, *, expected: Digest | None) -> None:
        self._step()
        super().set_ref(name, new, expected=expected)

    def list_refs(self, prefix: str = "") -> Iterator[Ref]:
        self._step()
        return super().list_refs(prefix)


def publish(store: Store, old: Sample) -> Digest:
    """What a builder does that has found its chunks in an old blob: touch; store again what is gone; publish; name."""
    for item in old.layer.blobs():
        try:
            store.touch(item.digest)
        except NotFound:
            assert put_bytes(store, BYTES[item.digest]).digest == item.digest
    digest = publish_object(store, old.layer)
    set_tag(store, "new:1", digest)
    return digest


BYTES: dict[Digest, bytes] = {}


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_f5_a_collector_beside_a_publisher(block: int) -> None:
    for seed in range(block * 300, (block + 1) * 300):
        clock = Clock()
        clock.offset = -2 * GRACE
        inner = MemoryStore(clock=clock)
        inner.capabilities = type(inner.capabilities)(connections=1)
        old = make_layer(inner, {"a": content(1, 1000)})
        BYTES.update({info.digest: inner.read(info.digest, 0, info.size) for info in inner.list()})
        clock.offset = 0
        turns = Turns(seed, ("collector", "publisher"))
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(_act, turns, "collector", sweep, Actor(inner, turns, "collector")),
                pool.submit(_act, turns, "publisher", publish, Actor(inner, turns, "publisher"), old),
            ]
        assert [run.exception() for run in runs] == [None, None], f"seed {seed}"
        assert verify(inner, inner.get_ref("new:1").digest, deep=True).ok, f"seed {seed}"


def _act(turns: Turns, name: str, work: Callable[..., object], *arguments: object) -> None:
    try:
        work(*arguments)
    finally:
        turns.leave(name)
