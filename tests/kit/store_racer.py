"""Run by test_store_crash.py as a program: moves one ref on and on by compare-and-swap, and says each success on a line, until told enough or killed."""

from __future__ import annotations

import sys

from dsec_layers.digest import Digest, sha256_digest
from dsec_layers.errors import Conflict, NotFound
from dsec_layers.store.open import open_store
from dsec_layers.store.transfer import put_bytes


def main(url: str, who: str, count: int) -> None:
    """``count`` successes."""
    store = open_store(url)
    done = 0
    while done < count:
        try:
            seen: Digest | None = store.get_ref("race:1").digest
        except NotFound:
            seen = None
        data = f"{who} {done}".encode()
        put_bytes(store, data)
        try:
            store.set_ref("race:1", sha256_digest(data), expected=seen)
        except Conflict:
            continue
        done += 1
        print(seen, sha256_digest(data), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
