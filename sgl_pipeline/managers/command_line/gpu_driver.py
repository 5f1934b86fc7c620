"""Says why stages cannot use an NVIDIA GPU whose driver is installed.

Asked by `pipeline_args.py` where PyTorch finds no GPU: a driver that is too old, or a PyTorch built
for CPUs, would otherwise serve on the CPU without a word.
"""

import re
import subprocess

_ANSWER_SECONDS = 10


def why_gpu_is_unusable() -> str | None:
    """One clause for a machine whose GPU PyTorch cannot use; None where there is no driver."""
    import torch

    try:
        answer = subprocess.run(
            ["nvidia-smi"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    # Drivers from 610 on call it the CUDA UMD version.
    reported = re.search(r"CUDA[A-Za-z ]*Version *: *([\d.]+)", answer)
    driver = f"an NVIDIA driver for CUDA {reported[1]}" if reported else "an NVIDIA driver"
    if torch.version.cuda is None:
        return (
            f"there is {driver}, but PyTorch {torch.__version__} is built for CPUs; for CUDA 13 or "
            "later, `make setup SET=cuda` installs the other build"
        )
    return (
        f"there is {driver}, but PyTorch {torch.__version__}, built for CUDA {torch.version.cuda}, "
        "cannot use a GPU; look at the driver and CUDA_VISIBLE_DEVICES"
    )
