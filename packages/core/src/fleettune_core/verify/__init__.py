"""Verification: a run's first steps on several layouts and backends, compared. Control side, but for `weights_main`."""
