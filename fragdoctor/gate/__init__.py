"""The gate: budgets and baselines that a diagnosis has to pass, and the judgement of many files."""
