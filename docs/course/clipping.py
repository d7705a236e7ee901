import torch
from torch import nn

for unscale in (False, True):
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    with torch.autocast("cpu", dtype=torch.float16):
        output = net(torch.full((2, 4), 0.25))
        loss = output.float().mean()  # gradient 0.25 for each of the four weights
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()

    moved = (1 - net.weight).norm().item()
    print(f"weights {net.weight.dtype}, output {output.dtype}, loss {loss.dtype}")
    print(f"unscale_ {unscale}: clipping saw norm {norm:g}; the weights moved by {moved:.1e}")
