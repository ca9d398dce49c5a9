"""Runs held against each other: two side by side, or several in time order."""
