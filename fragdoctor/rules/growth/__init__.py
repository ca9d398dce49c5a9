"""FD4xx: memory that grows and is not freed."""
