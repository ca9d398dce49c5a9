"""What CUDA kernels request: scratch memory besides results, orders, and sizes only they know.

``scratch`` holds the table of rules; each other module fills it for a kind of operation. The rules
were read from PyTorch's sources and compared, request by request, with the real allocator under
real CUDA builds; sizes that come from CUB are those of compute capability 9.0.
"""
