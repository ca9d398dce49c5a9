"""Remedies, one file each, and their ranking.

A remedy is proposed only where evidence asks for it.
"""
