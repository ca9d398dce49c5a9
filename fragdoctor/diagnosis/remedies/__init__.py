"""Remedies, one file each, and their ranking.

A remedy is proposed only if evidence calls for it.
"""
