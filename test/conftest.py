"""What all tests need: transformers must import on a CPU, and two cores must not be oversubscribed."""

import torch

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

install_torchvision_shim()
torch.set_num_threads(1)
