"""What all tests need: transformers imports on a CPU, and no test takes more than one core."""

import torch

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

install_torchvision_shim()
torch.set_num_threads(1)
