"""Disks for microVMs: sealed ones in a store, read lazily; writable ones in a local directory; and how one becomes the other."""
