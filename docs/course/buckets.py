import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18

from ddp_mnist.core.nets import CNN, MNIST

dist.init_process_group("gloo")
for name, net, shape in (("cnn", CNN(10, MNIST), MNIST), ("resnet18", resnet18(), (3, 32, 32))):
    model = DistributedDataParallel(net)
    for _ in range(3):  # the first backward shows DDP in which order gradients become ready
        model(torch.randn(2, *shape)).sum().backward()
    log = model._get_ddp_logging_data()
    sizes = [round(int(size) / 1e6, 2) for size in log["rebuilt_bucket_sizes"].split(",")]
    if dist.get_rank() == 0:
        print(f"{name}: {log['total_parameter_size_bytes'] / 1e6:.2f} MB in buckets of {sizes} MB")
dist.destroy_process_group()
