"""Memory of a run before it runs: parameters, states, activations, temporary peaks."""
