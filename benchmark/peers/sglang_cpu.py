"""SGLang's own server and pipeline on a CPU machine, started as `sglang.launch_server` is.

Started by `engines.py`; its flags are upstream's. Two stand-ins let upstream's registry wheel run
without its CUDA neighbors; nothing of ours runs in it. Spawned children run this module's top
level again, which is what puts the stand-ins into every process.
"""

import runpy
import sys
import types

import torch

from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotates `query` and `key` in place, as `vllm._custom_ops.rotary_embedding` is asked to.

    Args:
        positions: [tokens] int64.
        query, key: [tokens, heads * head_size].
        cos_sin_cache: [positions, rotary_dim], the cosines first.
        is_neox: pairs are (i, i + rotary_dim / 2), not neighbors.
    """
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin_cache.shape[-1]
    for states in (query, key):
        rotated = states.view(len(positions), -1, head_size)[..., :rotary_dim]
        if is_neox:
            first, second = rotated.chunk(2, dim=-1)
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        new_first, new_second = first * cos - second * sin, second * cos + first * sin
        first.copy_(new_first)
        second.copy_(new_second)


def install_rotary_stand_in() -> None:
    """Puts the one function that upstream imports from vLLM under the name it asks for."""
    package, operators = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    vars(operators)["rotary_embedding"] = rotary_embedding
    vars(package)["_custom_ops"] = operators
    sys.modules |= {"vllm": package, "vllm._custom_ops": operators}


install_torchvision_shim()
install_rotary_stand_in()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
