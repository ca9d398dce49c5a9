"""Turns the lines that a reader found into a story: order, trials, causes, trends."""
