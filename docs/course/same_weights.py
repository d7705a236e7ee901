import torch

whole, resumed = (torch.load(f"{name}.pt", weights_only=True) for name in ("whole", "resumed"))
for name, weight in whole["net"].items():
    print(name, "equal" if weight.equal(resumed["net"][name]) else "DIFFERENT")
