import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_rows = TensorDataset(images[:1400], labels[:1400])
loader = DataLoader(train_rows, batch_size=32, shuffle=True, drop_last=True)

net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for epoch in range(1, 4):
    loss_sum = 0.0
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
    print(f"epoch {epoch}: loss {loss_sum / len(loader):.4f}")

with torch.no_grad():
    right = (net(images[1400:]).argmax(1) == labels[1400:]).sum().item()
print(f"test: {right} of {len(labels) - 1400} right")
