"""A test here fails for what its servers log, unless it expects that."""

from __future__ import annotations

from tests.kit.daemon_logs import pytest_runtest_makereport, quiet_logs

__all__ = ["pytest_runtest_makereport", "quiet_logs"]
