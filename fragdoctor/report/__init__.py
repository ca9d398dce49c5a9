"""Reports: one output format a file, all fed by the same Diagnosis.

``base`` holds the table of formats, ``escape`` makes untrusted text safe for each sink.
"""
