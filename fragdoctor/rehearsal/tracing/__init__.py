"""One training step of the user's own model, run on fake tensors: the exact list of requests."""
