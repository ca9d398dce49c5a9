"""The allocator model: rehearsal, replay, fidelity, what-if, search."""
