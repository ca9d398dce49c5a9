"""Compares runs: two side by side, or several in time order."""
