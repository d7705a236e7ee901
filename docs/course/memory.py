import torch
from torchvision.models import resnet18

net = resnet18()
optimizer = torch.optim.Adam(net.parameters())
net(torch.randn(2, 3, 32, 32)).sum().backward()
optimizer.step()

weights = list(net.parameters())
moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
count = sum(weight.numel() for weight in weights)
for name, tensors in (
    ("weights", weights),
    ("gradients", [weight.grad for weight in weights]),
    ("Adam's two moments", moments),
):
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    print(f"{name:18}  {size / 1e6:6.1f} MB, {size // count} bytes a parameter")
