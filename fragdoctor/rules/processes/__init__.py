"""FD5xx: memory of other processes, other libraries and other ranks."""
