"""The store contract as tests. A backend joins by a subclass of ``StoreContract`` whose ``store`` fixture makes an empty store."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.errors import Conflict, CorruptError, NotFound, StoreError, UsageError
from dsec_layers.store.base import BlobInfo, Store, as_local
from dsec_layers.store.open import open_store
from dsec_layers.store.transfer import put_bytes, put_stream, read_blob, read_pieces

ABSENT = "sha256:" + "0" * 64
BAD_DIGESTS = (
    "",
    "sha256:",
    "sha256:" + "A" * 64,
    "sha256:" + "0" * 63,
    "sha512:" + "0" * 64,
    "sha256:../../../../etc/passwd" + "0" * 43,
    "0" * 64 + "\n",
)
BAD_NAMES = (
    "",
    "UPPER",
    "../x",
    "a/../b",
    "/a",
    "a/",
    "a b",
    "a:",
    "a:b:c",
    "a:../b",
    "a:" + "t" * 129,
    "n" * 201,
    "a\n",
    "a:b\n",
    "a:.b",
    "ä",
    "a\0",
)


def digest_of(number: int) -> Digest:
    """A digest that stands for a number."""
    return sha256_digest(str(number).encode())


class StoreContract:
    """Every test gets an empty store."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        raise NotImplementedError

    # Blobs

    def test_a_new_store_is_empty(self, store: Store) -> None:
        assert list(store.list()) == []
        assert list(store.list_refs()) == []

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, (1 << 20) + 1])
    def test_what_was_put_is_read(self, store: Store, size: int) -> None:
        data = random.Random(size).randbytes(size)
        before = time.time()
        info = put_bytes(store, data)
        assert info == BlobInfo(sha256_digest(data), size)
        assert store.stat(info.digest) == info
        assert before - 2 <= store.stat(info.digest).modified <= time.time() + 2
        assert store.read(info.digest, 0, size) == data
        assert read_blob(store, info.digest, limit=size) == data
        assert b"".join(read_pieces(store, info.digest, size, 1 << 18)) == data
        assert list(store.list()) == [info]

    def test_random_ranges(self, store: Store) -> None:
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        data = rng.randbytes(300_000)
        digest = put_bytes(store, data).digest
        for _ in range(50):
            offset = rng.randrange(len(data))
            length = rng.choice((0, 1, 100, 4096, 70_000))
            length = min(length, len(data) - offset)
            assert store.read(digest, offset, length) == data[offset : offset + length]

    def test_a_range_beyond_the_end_is_corrupt_not_absent_and_not_short(self, store: Store) -> None:
        digest = put_bytes(store, b"0123456789").digest
        for offset, length in ((0, 11), (9, 2), (10, 1), (1 << 40, 1)):
            with pytest.raises(CorruptError):
                store.read(digest, offset, length)
        assert store.read(digest, 10, 0) == b""
        for offset, length in ((-1, 1), (0, -1)):
            with pytest.raises(UsageError):
                store.read(digest, offset, length)

    def test_absent_is_not_found(self, store: Store) -> None:
        for call in (store.stat, store.touch, lambda digest: store.read(digest, 0, 1)):
            with pytest.raises(NotFound):
                call(ABSENT)
        assert store.delete(ABSENT)
        store.suspect(ABSENT)

    @pytest.mark.parametrize("digest", BAD_DIGESTS)
    def test_digests_are_checked_at_the_door(self, store: Store, digest: str) -> None:
        calls: tuple[Callable[[str], object], ...] = (
            store.stat,
            store.touch,
            store.delete,
            lambda text: store.read(text, 0, 1),
            lambda text: store.set_ref("a:b", text, expected=None),
        )
        for call in calls:
            with pytest.raises(UsageError):
                call(digest)

    def test_a_blob_is_streamed_from_any_buffers(self, store: Store) -> None:
        scratch = bytearray(b"abcd")
        with store.writer() as writer:
            assert writer.write(scratch) == 4
            scratch[:] = b"efgh"  # the writer must have taken what was there
            writer.write(memoryview(scratch)[1:3])
            writer.write(b"")
            info = writer.commit()
        assert store.read(info.digest, 0, 6) == b"abcdfg"

    def test_nothing_is_visible_before_commit(self, store: Store) -> None:
        with store.writer() as writer:
            writer.write(b"x" * 5000)
            assert list(store.list()) == []
            with pytest.raises(NotFound):
                store.stat(sha256_digest(b"x" * 5000))
            writer.commit()
        assert store.stat(sha256_digest(b"x" * 5000)).size == 5000

    def test_a_writer_left_without_commit_leaves_nothing(self, store: Store) -> None:
        with store.writer() as writer:
            writer.write(b"x" * 5000)
        with pytest.raises(RuntimeError), store.writer() as writer:
            writer.write(b"y" * 5000)
            raise RuntimeError
        assert list(store.list()) == []

    def test_a_writer_is_used_once(self, store: Store) -> None:
        with store.writer() as writer:
            writer.write(b"x")
            writer.commit()
            with pytest.raises(StoreError):
                writer.write(b"y")
            with pytest.raises(StoreError):
                writer.commit()
        assert [info.size for info in store.list()] == [1]

    def test_an_unexpected_digest_is_not_stored(self, store: Store) -> None:
        with pytest.raises(CorruptError):
            put_stream(store, [b"ab", b"cd"], ABSENT)
        assert list(store.list()) == []
        assert put_stream(store, [b"ab", b"cd"], sha256_digest(b"abcd")).size == 4

    def test_putting_again_changes_nothing_but_the_age(self, store: Store) -> None:
        info = put_bytes(store, b"twice")
        later = put_bytes(store, b"twice")
        assert info == later
        assert later.modified >= info.modified
        assert list(store.list()) == [info]

    def test_many_writers_of_one_blob(self, store: Store) -> None:
        data = random.Random(1).randbytes(200_000)
        with ThreadPoolExecutor(8) as pool:
            infos = list(pool.map(lambda _: put_bytes(store, data), range(16)))
        assert set(infos) == {BlobInfo(sha256_digest(data), len(data))}
        assert store.read(infos[0].digest, 0, len(data)) == data

    def test_many_readers_and_writers(self, store: Store) -> None:
        def work(number: int) -> None:
            data = random.Random(number % 12).randbytes(20_000 + number % 12)
            digest = put_bytes(store, data).digest
            assert store.read(digest, 17, 1000) == data[17:1017]
            assert store.stat(digest).size == len(data)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(48)))
        assert len(list(store.list())) == 12

    def test_listing_by_prefix(self, store: Store) -> None:
        digests = {put_bytes(store, str(number).encode()).digest for number in range(60)}
        assert {info.digest for info in store.list()} == digests
        one = min(digests)
        for length in (0, 3, 7, 8, 9, 12, 40, 71):
            assert {info.digest for info in store.list(one[:length])} == {digest for digest in digests if digest.startswith(one[:length])}
        assert list(store.list("sha512:")) == []
        assert list(store.list("sha256:x")) == []

    # Removal

    def test_a_deleted_blob_is_gone_and_may_come_back(self, store: Store) -> None:
        info = put_bytes(store, b"gone")
        assert store.read(info.digest, 0, 4) == b"gone"
        assert store.delete(info.digest)
        assert store.delete(info.digest)
        for call in (store.stat, store.touch, lambda digest: store.read(digest, 0, 4)):
            with pytest.raises(NotFound):
                call(info.digest)
        assert list(store.list()) == []
        assert put_bytes(store, b"gone") == info
        assert store.read(info.digest, 0, 4) == b"gone"

    def test_deletion_by_age(self, store: Store) -> None:
        info = put_bytes(store, b"aged")
        assert not store.delete(info.digest, older_than=info.modified - 60)
        assert store.read(info.digest, 0, 4) == b"aged"
        assert store.delete(info.digest, older_than=info.modified + 60)
        assert list(store.list()) == []

    def test_touch_makes_young(self, store: Store) -> None:
        info = put_bytes(store, b"young")
        touched = store.touch(info.digest)
        assert touched == info
        assert touched.modified >= info.modified
        assert not store.delete(info.digest, older_than=touched.modified - 1)
        assert store.stat(info.digest) == info

    # Refs

    def test_a_ref_is_set_read_moved_and_removed(self, store: Store) -> None:
        one, two = digest_of(1), digest_of(2)
        with pytest.raises(NotFound):
            store.get_ref("base:1")
        store.set_ref("base:1", one, expected=None)
        assert store.get_ref("base:1").digest == one
        assert store.get_ref("base:1").name == "base:1"
        store.set_ref("base:1", two, expected=one)
        assert store.get_ref("base:1").digest == two
        store.set_ref("base:1", None, expected=two)
        with pytest.raises(NotFound):
            store.get_ref("base:1")
        assert list(store.list_refs()) == []
        store.set_ref("base:1", None, expected=None)
        store.set_ref("base:1", one, expected=None)
        assert store.get_ref("base:1").digest == one

    def test_a_ref_that_is_not_as_expected_is_a_conflict(self, store: Store) -> None:
        one, two = digest_of(1), digest_of(2)
        with pytest.raises(Conflict):
            store.set_ref("r:t", two, expected=one)
        store.set_ref("r:t", one, expected=None)
        for new in (one, two, None):
            for expected in (None, two):
                with pytest.raises(Conflict):
                    store.set_ref("r:t", new, expected=expected)
        assert store.get_ref("r:t").digest == one

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_names_are_checked_at_the_door(self, store: Store, name: str) -> None:
        with pytest.raises(UsageError):
            store.get_ref(name)
        with pytest.raises(UsageError):
            store.set_ref(name, ABSENT, expected=None)
        assert list(store.list_refs()) == []

    def test_names_that_are_near_each_other_are_different(self, store: Store) -> None:
        names = [
            "a/b:1",
            "a-b:1",
            "a.b:1",
            "a_b:1",
            "a:b",
            "a/b:b",
            "a/b/c:1",
            "a/b:1.0",
            "a:" + "T" * 128,
            "n" * 200 + ":latest",
            "a/" * 99 + "a:x",
        ]
        for number, name in enumerate(names):
            store.set_ref(name, digest_of(number), expected=None)
        assert [(ref.name, ref.digest) for ref in store.list_refs()] == sorted(
            (name, digest_of(number)) for number, name in enumerate(names)
        )
        assert store.get_ref("a/b:1").digest == digest_of(0)

    def test_the_tag_may_be_left_out(self, store: Store) -> None:
        store.set_ref("plain", ABSENT, expected=None)
        assert store.get_ref("plain:latest").name == "plain:latest"

    def test_refs_are_listed_by_prefix(self, store: Store) -> None:
        for name in ("ab:1", "ab:12", "abc:1", "b:1", "ab/c:1"):
            store.set_ref(name, ABSENT, expected=None)
        for prefix in ("", "a", "ab", "ab:", "ab:1", "ab/", "abc:1", "z", "ab:12x"):
            expected = sorted(name for name in ("ab:1", "ab:12", "abc:1", "b:1", "ab/c:1") if name.startswith(prefix))
            assert [ref.name for ref in store.list_refs(prefix)] == expected

    def test_of_many_that_change_a_ref_at_once_one_wins(self, store: Store) -> None:
        """Each success must have replaced the value it expected: the values form one chain, with no success lost."""
        wins: list[tuple[Digest | None, Digest]] = []
        lock = threading.Lock()

        def work(worker: int) -> None:
            done = 0
            while done < 5:
                try:
                    seen: Digest | None = store.get_ref("race:1").digest
                except NotFound:
                    seen = None
                new = digest_of(worker * 100 + done)
                try:
                    store.set_ref("race:1", new, expected=seen)
                except Conflict:
                    continue
                done += 1
                with lock:
                    wins.append((seen, new))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(1, 5)))
        follows = dict(wins)
        assert len(follows) == len(wins) == 20
        value, steps = follows.get(None), 1
        while value in follows:
            value, steps = follows[value], steps + 1
        assert steps == 20
        assert store.get_ref("race:1").digest == value

    # Handles

    def test_another_handle_sees_the_same(self, store: Store) -> None:
        digest = put_bytes(store, b"shared").digest
        store.set_ref("s:1", digest, expected=None)
        with closing(open_store(store.url)) as other:
            assert other.url == store.url
            assert other.read(digest, 0, 6) == b"shared"
            assert other.get_ref("s:1").digest == digest
            other.set_ref("s:1", ABSENT, expected=digest)
        assert store.get_ref("s:1").digest == ABSENT

    def test_local_files_are_the_blobs(self, store: Store) -> None:
        digest = put_bytes(store, b"local" * 1000).digest
        local = as_local(store)
        assert (local is not None) == store.capabilities.local
        if local is None:
            return
        assert hashlib.sha256(local.local_path(digest).read_bytes()).hexdigest() == digest[7:]
        with open(local.open_fd(digest), "rb") as stream:
            assert stream.read() == b"local" * 1000
        for call in (local.local_path, local.open_fd):
            with pytest.raises(NotFound):
                call(ABSENT)

    def test_capabilities_are_sensible(self, store: Store) -> None:
        assert 1 <= store.capabilities.connections <= 1024
        assert store.capabilities.read_size >= 1
