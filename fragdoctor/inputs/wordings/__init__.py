"""Wordings of out-of-memory messages: one family a file, tables of ``Wording``."""
