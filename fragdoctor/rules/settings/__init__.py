"""FD3xx: allocator settings that do not do what they seem to."""
