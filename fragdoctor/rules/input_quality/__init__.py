"""FD9xx: what the input does not show."""
