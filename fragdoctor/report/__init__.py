"""Reports: one file for each output format, all fed by the same Diagnosis.

``base`` holds the table of formats, ``escape`` makes untrusted text safe for each sink.
"""
