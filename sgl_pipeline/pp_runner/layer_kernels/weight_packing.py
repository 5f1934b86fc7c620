"""The layouts in which the compiled products read their weights (`product_panels.h`,
`side_products.h` and the products' sources in `cpu_kernels/`).

For each weight once, when it arrives. Computes only the order and the padding.
"""

import torch
import torch.nn.functional as F

BLOCK_OUTPUTS = 16
_TILE_LINES = 16
# What a line of a tile has of each output of a block.
_UNITS = {2: torch.int16, 4: torch.int32}


def in_blocks(rows: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """Per-output values (bias, scale), `rows` [O, ...], as [blocks, 16, ...], padded with zeros; if
    gated, where the gates are the first half of O, with alternating blocks of gates and of ups."""
    parts = []
    for part in rows.chunk(2) if is_gated else (rows,):
        missing = -len(part) % BLOCK_OUTPUTS
        if missing:
            part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
        parts.append(part.unflatten(0, (-1, BLOCK_OUTPUTS)))
    return torch.stack(parts, dim=1).flatten(0, 1) if is_gated else parts[0]


def in_lines(values: torch.Tensor, unit_bytes: int, is_gated: bool) -> torch.Tensor:
    """The weight `values` [O, I] of 8 or 16 bits as [blocks, lines, 16], whole tiles of them, of
    units of `unit_bytes` of each output."""
    lines = -(-values.shape[1] * values.dtype.itemsize // (unit_bytes * _TILE_LINES)) * _TILE_LINES
    missing = lines * unit_bytes // values.dtype.itemsize - values.shape[1]
    as_bytes = values.contiguous().view(torch.uint8)
    padded = F.pad(as_bytes, (0, missing * values.dtype.itemsize)) if missing else as_bytes
    units = padded.view(_UNITS[unit_bytes])
    return in_blocks(units, is_gated).transpose(1, 2).contiguous()


def in_quads(numbers: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """The 4-bit `numbers` [O, I] uint8 as [blocks, I / 8, 16, 2] int16, whole tiles of them: four
    numbers in each, of every other input."""
    missing = -numbers.shape[1] % (2 * _TILE_LINES)
    padded = F.pad(numbers, (0, missing)) if missing else numbers
    by_place = in_blocks(padded, is_gated).unflatten(2, (-1, 4, 2))  # [blocks, 16, quads, 4, 2]
    quads = torch.zeros_like(by_place[:, :, :, 0], dtype=torch.int16)
    for place in range(4):
        quads |= by_place[:, :, :, place].to(torch.int16) << 4 * place
    return quads.transpose(1, 2).contiguous()


def in_byte_pairs(numbers: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """The 4-bit `numbers` [O, I] uint8 as [blocks, I / 4, 16, 2] uint8, whole tiles of 32 inputs:
    in each byte a number, and above it that of the second input after; of outputs in the order in
    which AVX2 unpacks bytes (`avx2_mxfp4_products.cpp`)."""
    missing = -numbers.shape[1] % (2 * _TILE_LINES)
    padded = F.pad(numbers, (0, missing)) if missing else numbers
    by_place = in_blocks(padded, is_gated).unflatten(2, (-1, 2, 2))  # [blocks, 16, fours, 2, 2]
    both = by_place[:, :, :, 0] | by_place[:, :, :, 1] << 4
    halves = both.unflatten(1, (2, 2, 4)).transpose(1, 2).flatten(1, 3)
    return halves.transpose(1, 2).contiguous()


def in_half_bytes(numbers: torch.Tensor, is_gated: bool) -> torch.Tensor:
    """The 4-bit `numbers` [O, I] uint8 as [blocks, I / 8, 16, 4] uint8, whole tiles of 64 inputs:
    in each byte a number, and above it that of the fourth input after."""
    missing = -numbers.shape[1] % 64
    padded = F.pad(numbers, (0, missing)) if missing else numbers
    by_place = in_blocks(padded, is_gated).unflatten(2, (-1, 2, 4))  # [blocks, 16, eights, 2, 4]
    both = by_place[:, :, :, 0] | by_place[:, :, :, 1] << 4
    return both.transpose(1, 2).contiguous()


def beside_groups(numbers: torch.Tensor, repeats: int, count: int, is_gated: bool) -> torch.Tensor:
    """Values of each output and group, `numbers` [O, G], as [blocks, `count`, 16]: each group
    `repeats` times, and at most `count` in all."""
    spread = numbers.repeat_interleave(repeats, dim=1)[:, :count]
    return in_blocks(spread, is_gated).transpose(1, 2).contiguous()
