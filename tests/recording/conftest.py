"""Fixtures of the tests of what runs inside the user's program."""

from stand_in_torch import fake_torch as fake_torch  # noqa: PLC0414 - a fixture
