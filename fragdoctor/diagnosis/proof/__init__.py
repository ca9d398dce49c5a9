"""Advice is tested before it is given: proposals meet the replayed trace."""
