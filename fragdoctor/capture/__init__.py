"""What runs beside PyTorch: limits on the GPU memory of tests."""
