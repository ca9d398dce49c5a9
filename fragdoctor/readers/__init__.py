"""Readers: bytes in, typed values out. Nothing here prints, and nothing is executed."""
