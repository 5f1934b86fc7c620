"""Calls of compiled kernels, recorded as they are made, to be made again with nothing in between.

The counterpart of a CUDA graph, for any number of rows. It saves Python's share of short steps and
the start and end of a team of threads for each kernel. It knows nothing of the computation, and it
holds addresses: drop recorded calls before the weights and pages that they read.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_pipeline.pp_runner.cpu_kernels.functions import CompiledFunctions, heard_by

_aten = torch.ops.aten
_RESERVES_MEMORY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
}
_ROWS_AT_LEAST = 64  # of the memory of intermediate results; a multiple keeps each aligned
_ALIGNMENT_BYTES = 64  # of that memory


def record(
    compute: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], num_rows: int
) -> tuple[torch.Tensor, "RecordedCalls | None"]:
    """The result of `compute`, and its calls of kernels, to be made again with other `inputs`.

    `compute` must be independent of the number of rows and chunks. Returns no calls where it does
    anything else with numbers than to call kernels, where an intermediate or the last result does
    not have `num_rows`, where no kernel made the last one, where a kernel reads from the middle of
    an input or of such a result, or where two inputs have one address, as empty ones do.
    """
    heard = _HeardCalls(num_rows)
    with heard_by(heard), heard:
        output = compute()
    addresses = {tensor.data_ptr() for tensor in inputs}
    if heard.functions is None or not heard.is_of_kernels or len(addresses) < len(inputs):
        return output, None
    if output.shape[:1] != (num_rows,) or not output.is_contiguous():
        return output, None
    begin = output.data_ptr()
    last = heard.result_at(begin)
    if last is None or (last.begin, last.end) != (begin, begin + output.nbytes):
        return output, None
    if heard.reads_within(inputs):
        return output, None
    return output, RecordedCalls(heard, heard.functions, inputs, output, last)


class RecordedCalls:
    """The calls of one computation. `run` makes them with other inputs.

    Intermediate results share memory of its own: one takes the place of another that is no longer
    read.
    """

    def __init__(
        self,
        heard: "_HeardCalls",
        functions: CompiledFunctions,
        inputs: Sequence[torch.Tensor],
        output: torch.Tensor,
        last: "_Result",
    ) -> None:
        self._words, are_addresses = np.array(heard.words, np.int64), np.array(heard.are_addresses)
        self._numbers = np.array(heard.numbers, np.int32)
        self._begins = np.array(heard.begins, np.int64)
        self._size_places = {
            size: np.array(places, np.int64) for size, places in heard.size_places.items()
        }
        self._dtypes = [tensor.dtype for tensor in inputs]
        self._row = output.new_empty(0, *output.shape[1:])
        intermediate = [one for one in heard.results if one is not last and one.places]
        self._places = [
            *(np.flatnonzero(are_addresses & (self._words == one.data_ptr())) for one in inputs),
            np.array(last.places, np.int64),
        ]
        self._results = share_memory([self._lifetime(one) for one in intermediate])
        self._row_bytes = max((one.begin + one.row_bytes for one in self._results), default=0)
        self._most_rows = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._run_calls = functions.plain("run_calls")

    @property
    def memory_bytes(self) -> int:
        """Bytes of the intermediate results."""
        return self._memory.nbytes

    def run(
        self, inputs: Sequence[torch.Tensor], num_rows: int, num_chunks: int, num_threads: int
    ) -> torch.Tensor:
        """The result, a new tensor. `inputs` have the order and dtypes of the recorded ones, and
        sizes for `num_rows` and `num_chunks`."""
        if num_rows > self._most_rows:
            self._reserve(num_rows)
        output = self._row.new_empty(num_rows, *self._row.shape[1:])
        words = self._words
        for tensor, dtype in zip(inputs, self._dtypes, strict=True):
            assert tensor.dtype == dtype and tensor.is_contiguous()
        for places, tensor in zip(self._places, (*inputs, output), strict=True):
            words[places] = tensor.data_ptr()
        words[self._size_places["num_rows"]] = num_rows
        words[self._size_places["num_chunks"]] = num_chunks
        self._run_calls(
            len(self._numbers),
            self._numbers.ctypes.data,
            self._begins.ctypes.data,
            words.ctypes.data,
            num_threads,
        )
        return output

    def _lifetime(self, result: "_Result") -> "Lifetime":
        places = np.array(result.places, np.int64)
        calls = np.searchsorted(self._begins, places, "right") - 1
        return Lifetime(result.row_bytes, int(calls[0]), int(calls[-1]), places)

    def _reserve(self, num_rows: int) -> None:
        """Makes room for the intermediate results of `num_rows`."""
        self._most_rows = -(-num_rows // _ROWS_AT_LEAST) * _ROWS_AT_LEAST
        self._memory = torch.empty(
            self._most_rows * self._row_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8
        )
        address = -(-self._memory.data_ptr() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        for result in self._results:
            self._words[result.places] = address + result.begin * self._most_rows


@dataclass(slots=True)
class Lifetime:
    """An intermediate result: the first and the last call with its address, the words that are this
    address, and where it begins in the memory of one row."""

    row_bytes: int
    first_call: int
    last_call: int
    places: np.ndarray
    begin: int = 0

    def meets(self, other: "Lifetime") -> bool:
        return self.first_call <= other.last_call and other.first_call <= self.last_call


def share_memory(results: Sequence[Lifetime]) -> Sequence[Lifetime]:
    """Gives each of `results` the lowest place that is free during its life, in the order in which
    their lives begin."""
    placed: list[Lifetime] = []
    for result in sorted(results, key=lambda one: one.first_call):
        for other in sorted(placed, key=lambda one: one.begin):
            if other.meets(result) and other.begin < result.begin + result.row_bytes:
                result.begin = max(result.begin, other.begin + other.row_bytes)
        placed.append(result)
    return placed


@dataclass(slots=True)
class _Result:
    """Memory that was reserved for rows: its addresses [begin, end), and the words that are
    `begin`."""

    begin: int
    end: int
    row_bytes: int
    places: list[int] = field(default_factory=list)


class _HeardCalls(TorchDispatchMode):
    """The kernels that are called while it is entered, and the memory that is reserved.

    `numbers` are those of the kernels, `begins` say where the words of each call begin. `results`
    are not kept: an address is that of the last one that was made there.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.functions: CompiledFunctions | None = None
        self.is_of_kernels = True  # alone, each of all rows
        self.results: list[_Result] = []
        self._num_rows = num_rows
        self._newest: list[_Result] = []  # where no other one was made since
        self.numbers: list[int] = []
        self.begins: list[int] = []
        self.words: list[int] = []
        self.are_addresses: list[bool] = []
        self.size_places: dict[str, list[int]] = {"num_rows": [], "num_chunks": []}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by torch, and to keep its compiler out of `__torch_dispatch__`
        torch would import it, for seconds, in the middle of a step."""
        return False

    def hear(self, functions: CompiledFunctions, name: str, arguments: tuple[Any, ...]) -> None:
        """See `CallListener.hear`."""
        self.functions = functions
        number = functions.plain("kernel_number")(name.encode())
        assert number >= 0, f"the compiled library cannot make recorded calls of {name}"
        begin = len(self.words)
        self.numbers.append(number)
        self.begins.append(begin)
        signature = functions.signatures[name]
        for argument, kind in zip(arguments, signature.parameters.values(), strict=True):
            word, is_address = _word(argument, kind), kind is ctypes.c_void_p
            result = self.result_at(word) if is_address else None
            if result is not None:
                self.is_of_kernels &= word == result.begin
                result.places.append(len(self.words))
            self.words.append(word)
            self.are_addresses.append(is_address)
        size, place = signature.size_place()
        self.size_places[size].append(begin + place)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _RESERVES_MEMORY:
            self._reserve(result)
        elif not _is_view(function, args, result):
            self.is_of_kernels = False
        return result

    def _reserve(self, tensor: torch.Tensor) -> None:
        if tensor.shape[:1] != (self._num_rows,) or tensor.nbytes == 0:
            self.is_of_kernels = False
            return
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        result = _Result(begin, end, tensor.nbytes // self._num_rows)
        self._newest = [one for one in self._newest if one.end <= begin or end <= one.begin]
        self._newest.append(result)
        self.results.append(result)

    def result_at(self, address: int) -> _Result | None:
        """The one with `address` in its memory."""
        return next((one for one in self._newest if one.begin <= address < one.end), None)

    def reads_within(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if an address lies behind the beginning of one of `tensors`."""
        words = np.array(self.words)[np.array(self.are_addresses)]
        return any(
            bool(((words > begin) & (words < begin + tensor.nbytes)).any())
            for tensor in tensors
            for begin in [tensor.data_ptr()]
        )


def _is_view(function: Any, args: Any, result: Any) -> bool:
    """True if an operation of torch only gave its first argument's memory another shape."""
    tensors = [one for one in (*args[:1], result) if isinstance(one, torch.Tensor)]
    if any(tensor.is_mkldnn for tensor in tensors):  # a weight that is packed for one product
        return False
    addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return len(tensors) == 2 and len(addresses) == 1 and not function._schema.is_mutable


def _word(argument: Any, kind: Any) -> int:
    """An argument in eight bytes, as recorded_calls.cpp reads it."""
    if argument is None:
        return 0
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument)
