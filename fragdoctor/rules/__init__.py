"""Rules: one file, one class, one code each. A rule turns a context into findings."""
