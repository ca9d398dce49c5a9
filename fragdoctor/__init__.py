"""fragdoctor: a command-line doctor for PyTorch GPU out-of-memory."""
