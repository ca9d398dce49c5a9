"""fragdoctor: a command-line doctor for PyTorch GPU out-of-memory."""
__version__ = "0.1.0"
