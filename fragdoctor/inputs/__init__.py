"""Readers that turn files, folders, URLs and standard input into typed values.

Nothing in an input is ever executed.
"""
