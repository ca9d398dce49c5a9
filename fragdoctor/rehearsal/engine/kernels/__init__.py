"""What CUDA kernels ask for: scratch memory beside results, orders, sizes that only they know.

``steps`` holds the table of rules; each other module fills it for a kind of operation. What a rule
says was read off PyTorch's sources and compared, request by request, with the real allocator under
real CUDA builds; sizes that come from CUB are those of compute capability 9.0.
"""
