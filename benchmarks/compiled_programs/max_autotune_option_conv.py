import torch, torch.nn as nn

m = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 1)).cuda().half().to(memory_format=torch.channels_last)
f = torch.compile(m, options={"max_autotune": True, "max_autotune_gemm_backends": "ATEN"})
with torch.no_grad():
    for i in range(5):
        f(torch.randn(32, 64, 128, 128, device="cuda", dtype=torch.half).to(memory_format=torch.channels_last)).sum()
        torch.empty(40961 + i, dtype=torch.uint8, device="cuda")  # ends a step
