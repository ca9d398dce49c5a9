"""What runs inside the rehearsed program: fake GPUs, real memory requests.

Nothing here imports more than PyTorch, the standard library and the plain modules of fragdoctor:
the program's Python has its own packages, and need not have fragdoctor's.
"""
