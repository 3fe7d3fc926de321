"""A test here fails for what its servers log, unless it expects that."""

from __future__ import annotations

from tests.kit.daemon_logs import log_places, pytest_runtest_makereport, pytest_runtest_teardown

__all__ = ["log_places", "pytest_runtest_makereport", "pytest_runtest_teardown"]
