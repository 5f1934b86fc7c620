"""Blocks of a GGUF file become the numbers that the gguf package says, a part at a time."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.gguf_index import (
    INDEX_FILE,
    WEIGHTS_FILE,
    GgufIndex,
    GgufTensor,
    write_gguf_index,
)
from sgl_pipeline.pp_runner.weights import gguf_weights
from sgl_pipeline.pp_runner.weights.checkpoint import weight_opener
from sgl_pipeline.pp_runner.weights.gguf_weights import GgufWeights

CPU = torch.device("cpu")
ROWS, COLUMNS = 7, 512
KINDS = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)


def model_of(directory: Path, content: bytes, **tensors: GgufTensor) -> Path:
    path = directory / WEIGHTS_FILE
    path.write_bytes(content)
    status = path.stat()
    write_gguf_index(directory, GgufIndex(status.st_size, status.st_mtime_ns, tensors))
    return directory


def blocks_of(kind: GGMLQuantizationType) -> np.ndarray:
    """Random blocks [ROWS, bytes] whose scales are finite: no byte is that of a large exponent."""
    numbers, num_bytes = GGML_QUANT_SIZES[kind]
    bits = np.random.default_rng(0).integers(0, 60, (ROWS, COLUMNS // numbers * num_bytes))
    return bits.astype(np.uint8)


@pytest.mark.parametrize("name", KINDS)
def test_all_rows_are_read_whatever_the_parts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = GGMLQuantizationType[name]
    blocks = blocks_of(kind)
    entry = GgufTensor(int(kind), (ROWS, COLUMNS), 32, blocks.nbytes)
    model_of(tmp_path, bytes(32) + blocks.tobytes(), t=entry)
    expected = torch.tensor(gguf.dequantize(blocks, kind))
    monkeypatch.setattr(gguf_weights, "_NUMBERS_AT_ONCE", 3 * COLUMNS)
    source = weight_opener(tmp_path, "gguf", torch.float32, CPU)()
    assert torch.equal(source.read("t", (ROWS, COLUMNS)), expected)
    assert source.loaded == {"t": ROWS * COLUMNS * 4}


def test_rows_of_pairs_become_rows_of_halves(tmp_path: Path) -> None:
    halves = torch.arange(2 * 6 * 3, dtype=torch.float32).view(12, 3)
    pairs = halves.view(2, 2, 3, 3).transpose(1, 2).contiguous()
    entry = GgufTensor(0, (12, 3), 0, pairs.nbytes, paired_heads=2)
    model_of(tmp_path, pairs.numpy().tobytes(), t=entry)
    assert torch.equal(GgufWeights(tmp_path, torch.float32, CPU).read("t", (12, 3)), halves)


def source_of(
    directory: Path, values: np.ndarray, dtype: torch.dtype = torch.float32
) -> GgufWeights:
    entry = GgufTensor(0, values.shape, 0, values.nbytes)
    return GgufWeights(model_of(directory, values.tobytes(), t=entry), dtype, CPU)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.nan, torch.float32), (np.inf, torch.bfloat16), (1e6, torch.float16)],
)
def test_a_number_that_is_not_finite_is_refused(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    values = np.ones((4, 8), np.float32)
    values[2, 5] = value
    with pytest.raises(CheckpointError, match="tensor t holds a number that is not finite"):
        source_of(tmp_path, values, dtype).read("t", (4, 8))


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    source = source_of(tmp_path, np.ones((4, 8), np.float32))
    assert source.has("t") and not source.has("u")
    with pytest.raises(CheckpointError, match=r"holds no tensor u .*\[4, 8\]"):
        source.read("u", (4, 8))
    with pytest.raises(CheckpointError, match=r"tensor t has shape \[4, 8\].*\[8, 4\]"):
        source.read("t", (8, 4))
    assert source.read("t", (1, 4, 8)).shape == (1, 4, 8)


def test_a_file_that_changes_or_goes_while_it_is_served_is_a_message(tmp_path: Path) -> None:
    source = source_of(tmp_path, np.ones((4, 8), np.float32))
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.gguf has changed since"):
        source.read("t", (4, 8))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.gguf: No such file"):
        source.read("t", (4, 8))


def test_a_tensor_beyond_the_files_end_is_a_message(tmp_path: Path) -> None:
    model_of(tmp_path, bytes(100), t=GgufTensor(0, (4, 8), 0, 128))
    with pytest.raises(CheckpointError, match="ends at byte 100"):
        GgufWeights(tmp_path, torch.float32, CPU).read("t", (4, 8))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"size": 1, "mtime_ns": 2, "tensors": {"t": 3}}'])
def test_a_faulty_index_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"gguf_index\.json is not an index"):
        weight_opener(tmp_path, "gguf", torch.float32, CPU)
