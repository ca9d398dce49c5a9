"""Inputs: files, folders, URLs and standard input become typed values; nothing is executed."""
