"""The report of ``fragdoctor estimate``: one file a format."""
