"""Plain data: what was read, what was found, what is recommended. Imports nothing of the rest."""
