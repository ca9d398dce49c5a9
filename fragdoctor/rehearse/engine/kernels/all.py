"""Fills the table of rules."""

from __future__ import annotations
