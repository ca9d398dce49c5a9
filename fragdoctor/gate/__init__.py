"""The gate: budgets and baselines that a diagnosis has to meet, and the judgment of many files."""
