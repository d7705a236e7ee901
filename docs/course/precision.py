import torch

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    kept = torch.tensor([1.001, 1e-8, 70000.0]).to(dtype).tolist()
    print(f"{dtype}: 1.001 is {kept[0]:.4f}, 1e-8 is {kept[1]:.0e}, 70000 is {kept[2]:g}")

w = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([w], lr=1.0)
scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
for slope in (1e-8, 2.0):
    plain = torch.autograd.grad((w.half().float() * slope).sum(), w)[0].item()
    optimizer.zero_grad()
    loss = (w.half().float() * slope).sum()  # its gradient, the slope, passes through fp16
    scale = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # divides the gradient by the scale; skips the step if it overflowed
    scaler.update()
    print(f"gradient {slope:.0e}: {plain:.0e} in fp16; scaled by {scale:.0f}: {w.grad.item():.0e},")
    print(f"  then w = {w.item():.0e}, next scale {scaler.get_scale():.0f}")
