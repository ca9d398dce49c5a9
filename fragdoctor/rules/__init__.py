"""Rules: each has its own file, class and code, and turns a context into findings."""
