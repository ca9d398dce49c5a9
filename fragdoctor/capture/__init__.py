"""Code that runs beside PyTorch, such as limits on the GPU memory of tests."""
