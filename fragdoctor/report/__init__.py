"""Reports: one output format a file, all fed by the same Diagnosis."""
