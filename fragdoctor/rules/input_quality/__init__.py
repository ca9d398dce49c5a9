"""FD9xx: what the input cannot say."""
