"""What FlashInfer's compiled functions compute, in torch on a CPU, and what they refuse.

By the library's documentation and the checks in its C++ (0.7.2). Where a kernel takes a layout for
granted without a check, it is asserted here. Results are computed in fp64 and rounded once, but
for the sum of `add_and_norm`, which is rounded where the library does.
"""

import torch

FP8 = torch.float8_e4m3fn

Pages = tuple[torch.Tensor, torch.Tensor]


def attention_of_indices(
    q: torch.Tensor,
    pages: Pages,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float,
    is_causal: bool,
    out: torch.Tensor,
    window_left: int = -1,
    soft_cap: float = 0.0,
) -> None:
    """FlashInfer's tutorial on the KV layout: if it `is_causal`, the last row of a request sees all
    of its keys and each row before it one less. A row sees `window_left` keys before its own (-1:
    all), and scores are capped at `soft_cap` (0: not)."""
    for table in (qo_indptr, kv_indptr, indices, last_page_len):
        _check_table(table, q.device)
    assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
    _check_pages(pages)
    page_size, num_kv_heads, head_dim = pages[0].shape[1:]
    assert q.dim() == 3 and q.shape[2] == head_dim and q.shape[1] % num_kv_heads == 0
    assert pages[0].dtype in (q.dtype, FP8) and q.stride(-1) == 1
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    group = q.shape[1] // num_kv_heads
    query_ends, page_ends = qo_indptr.tolist(), kv_indptr.tolist()
    assert query_ends[-1] == len(q) and page_ends[-1] <= len(indices)
    for request, last in enumerate(last_page_len.tolist()):
        own = indices[page_ends[request] : page_ends[request + 1]].long()
        assert len(own) and 1 <= last <= page_size, "a request without a key"
        length = (len(own) - 1) * page_size + last
        keys, values = (
            store[own].flatten(0, 1)[:length].double().repeat_interleave(group, dim=1)
            for store in pages
        )
        rows = slice(query_ends[request], query_ends[request + 1])
        queries = q[rows].double()
        scores = torch.einsum("thd,khd->htk", queries, keys) * sm_scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        own_keys = torch.arange(length - len(queries), length)[:, None]
        hidden = torch.zeros(len(queries), length, dtype=torch.bool)
        if is_causal:
            hidden |= torch.arange(length) > own_keys
        if window_left >= 0:
            hidden |= torch.arange(length) < own_keys - window_left
        scores = scores.masked_fill(hidden, float("-inf"))
        out[rows] = torch.einsum("htk,khd->thd", scores.softmax(dim=-1), values).to(q.dtype)


def norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Of [T, H], or of [T, heads, D], whose first two strides are free."""
    assert input.dim() in (2, 3) and input.shape == out.shape
    _check_rows(input, out)
    _check_weight(weight, input)
    out.copy_(_normed(input.double(), weight, eps))


def add_and_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """`residual += input`, then `input` = the norm of the sum in fp32, before it was rounded."""
    assert input.dim() == 2 and input.shape == residual.shape
    assert input.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
    _check_rows(input, residual)
    _check_weight(weight, input)
    total = input.float() + residual.float()
    residual.copy_(total)
    input.copy_(_normed(total.double(), weight, eps))


def silu_and_mul(out: torch.Tensor, input: torch.Tensor) -> None:
    """The kernel knows no strides: rows lie one after the other."""
    _check_rows(input, out)
    assert input.is_contiguous() and out.is_contiguous()
    gate, up = input.double().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    interleave: bool,
) -> None:
    """For neighboring pairs the kernel reads one row of the table beyond the last position."""
    _check_rows(q, k, q_rope, k_rope)
    assert q.dim() == k.dim() == 3 and len(q) == len(k) and q.shape[2] == k.shape[2]
    assert q.shape == q_rope.shape and k.shape == k_rope.shape
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.dim() == 2 and cos_sin_cache.is_contiguous()
    assert pos_ids.shape == (len(q),) and pos_ids.is_contiguous()
    assert pos_ids.dtype in (torch.int32, torch.int64)
    assert int(pos_ids.max()) + int(interleave) < len(cos_sin_cache)
    cosine, sine = cos_sin_cache[pos_ids.long()].double()[:, None].chunk(2, dim=-1)
    pairs = cosine.shape[-1]
    first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    if interleave:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    for heads, rotated in ((q, q_rope), (k, k_rope)):
        turned = heads.double()
        x, y = turned[..., first].clone(), turned[..., second].clone()
        turned[..., first] = x * cosine - y * sine
        turned[..., second] = y * cosine + x * sine
        rotated.copy_(turned)


def append(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    pages: Pages,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes row t to position `positions[t]` of request `batch_indices[t]`."""
    for table in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        _check_table(table, append_key.device)
    _check_pages(pages)
    _check_rows(append_key, append_value, *pages)
    page_size = pages[0].shape[1]
    for rows in (append_key, append_value):
        assert rows.shape == (len(positions), *pages[0].shape[2:])
    assert len(batch_indices) == len(positions) and len(kv_indptr) == len(kv_last_page_len) + 1
    assert (positions < (len(kv_indices) - 1) * page_size + kv_last_page_len[-1]).all()
    first_pages = kv_indptr[batch_indices.long()].long()
    own_pages = kv_indices[first_pages + positions // page_size].long()
    for store, rows in zip(pages, (append_key, append_value), strict=True):
        # torch cannot scatter FP8, but bytes
        _bytes(store)[own_pages, (positions % page_size).long()] = _bytes(rows)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _normed(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * (rows.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.double()


def _check_rows(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert len(tensor), "a launch without a block fails"
        assert tensor.dtype == tensors[0].dtype
        assert tensor.stride(-1) == 1, "the kernels know no stride of the last dimension"


def _check_weight(weight: torch.Tensor, rows: torch.Tensor) -> None:
    assert weight.shape == rows.shape[-1:] and weight.dtype == rows.dtype
    assert weight.is_contiguous()


def _check_table(table: torch.Tensor, device: torch.device) -> None:
    assert table.dim() == 1 and table.dtype == torch.int32 and table.is_contiguous()
    assert table.device == device


def _check_pages(pages: Pages) -> None:
    """The kernels address both stores by the strides of the keys."""
    keys, values = pages
    assert keys.dim() == 4 and keys.shape == values.shape and keys.dtype == values.dtype
    assert keys.stride() == values.stride() and keys.stride(-1) == 1
