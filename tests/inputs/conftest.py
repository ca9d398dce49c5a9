"""Fixtures of the tests of inputs."""

from __future__ import annotations

from cli_fixtures import _plain_environment, pipeline, run

__all__ = ["_plain_environment", "pipeline", "run"]
