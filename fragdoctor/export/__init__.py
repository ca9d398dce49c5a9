"""Exports of a snapshot to other tools: tables, traces, flame graphs, a redacted snapshot."""
