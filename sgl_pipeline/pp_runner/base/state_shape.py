"""The state of a layer that keeps one in place of keys and values: its sizes and bytes.

Without torch, so that any process may ask.
"""

from collections.abc import Iterable
from dataclasses import dataclass

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_RECURRENT_BYTES = 4  # of a number, in any model


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of a layer of the gated delta rule (arXiv 2412.06464), for one request.

    A recurrent state in fp32 for each value head, [`key_dim`, `value_dim`], and the last
    `conv_width` - 1 inputs of the convolution over queries, keys and values, in the model's dtype.
    """

    num_value_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def bytes_per_slot(self, dtype: str) -> int:
        """Bytes of a request's state in a model of `dtype`, a torch dtype name."""
        recurrent_size = self.num_value_heads * self.key_dim * self.value_dim
        conv_size = self.num_channels * (self.conv_width - 1)
        return recurrent_size * _RECURRENT_BYTES + conv_size * _DTYPE_BYTES[dtype]


def slot_bytes_of_layers(states: Iterable[StateShape | None], dtype: str) -> tuple[int, ...]:
    """Bytes of a state slot in each of the layers with these states, 0 in one with pages."""
    return tuple(0 if one is None else one.bytes_per_slot(dtype) for one in states)
