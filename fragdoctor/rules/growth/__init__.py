"""FD4xx: memory that grows and does not come back."""
