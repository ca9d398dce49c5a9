"""Wordings of out-of-memory messages: tables of ``Wording``, one file per family."""
