"""The gated delta rule on CPU cores, by `cpu_kernels/gated_delta.cpp`.

It hands raw pointers to C++, so it must never pass a tensor on whose shape, type or layout was not
checked.
"""

import torch

from sgl_pipeline.pp_runner.base.state_rows import StateRows
from sgl_pipeline.pp_runner.cpu_kernels.library import CPU_DTYPES, CpuKernels
from sgl_pipeline.pp_runner.layer_kernels.gated_delta import GatedDeltaWeights, LayerStates

_CONV_WIDTHS = (2, 3, 4)  # those that are compiled


def compiled_gated_delta(
    kernels: CpuKernels,
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: GatedDeltaWeights,
    states: StateRows,
    pool: LayerStates,
) -> torch.Tensor:
    """See `LayerKernels.gated_delta`."""
    num_rows, num_channels = qkv.shape
    num_slots, num_value_heads, key_dim, value_dim = pool.recurrent.shape
    conv_width, num_runs = weights.conv.shape[0], states.read_slots.shape[0]
    values = num_value_heads * value_dim
    num_key_heads = (num_channels - values) // (2 * key_dim)
    assert num_channels == 2 * num_key_heads * key_dim + values
    assert num_key_heads > 0 and num_value_heads % num_key_heads == 0
    assert weights.conv.shape == (conv_width, num_channels) and conv_width in _CONV_WIDTHS
    assert pool.conv.shape == (num_slots, conv_width - 1, num_channels)
    assert z.shape == (num_rows, values) and weights.norm.shape == (value_dim,)
    assert a.shape == b.shape == (num_rows, num_value_heads)
    assert weights.a_log.shape == weights.dt_bias.shape == (num_value_heads,)
    assert states.write_slots.shape == states.starts_anew.shape == (num_runs,)
    assert states.row_indptr.shape == (num_runs + 1,) and states.run_indptr.ndim == 1
    assert qkv.dtype in CPU_DTYPES
    check_tensors(qkv.dtype, qkv, z, b, a, weights.conv, weights.norm, pool.conv)
    check_tensors(torch.float32, weights.a_log, weights.dt_bias, pool.recurrent)
    check_tensors(torch.int64, states.read_slots, states.write_slots)
    check_tensors(torch.bool, states.starts_anew)
    check_tensors(torch.int32, states.row_indptr, states.run_indptr)
    out = torch.empty_like(z)
    kernels.gated_delta(
        is_bf16=qkv.dtype == torch.bfloat16,
        run_indptr=states.run_indptr,
        num_chunks=states.run_indptr.shape[0] - 1,
        row_indptr=states.row_indptr,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_width=conv_width,
        read_slots=states.read_slots,
        write_slots=states.write_slots,
        starts_anew=states.starts_anew,
        qkv=qkv,
        z=z,
        b=b,
        a=a,
        conv=weights.conv,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        norm=weights.norm,
        epsilon=weights.epsilon,
        recurrent_states=pool.recurrent,
        conv_states=pool.conv,
        out=out,
        num_threads=torch.get_num_threads(),
    )
    return out


def check_tensors(dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    """Asserts that C++ can read them: contiguous, of `dtype`, in the memory of the CPU."""
    for tensor in tensors:
        assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
