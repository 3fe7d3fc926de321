"""``python -m dsec_layers`` and the ``dsec-layers`` command."""

from __future__ import annotations

from dsec_layers.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
