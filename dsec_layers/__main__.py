"""``python -m dsec_layers`` and the ``dsec-layers`` command."""

from __future__ import annotations

try:
    from dsec_layers.cli import main
except KeyboardInterrupt:  # Ctrl-C while modules load, before main() is there to say so
    raise SystemExit(130) from None

__all__ = ["main"]

if __name__ == "__main__":
    main()
