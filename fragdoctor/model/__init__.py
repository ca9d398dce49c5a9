"""Plain data: what was read, found and recommended. Imports nothing from the other folders."""
