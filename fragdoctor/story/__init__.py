"""From the lines that a reader found to a story: order, trials, causes, trends."""
