"""Hypothesis where a machine may stop for seconds: the same examples in each run, however long
drawing them takes.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

NO_CLOCK = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
