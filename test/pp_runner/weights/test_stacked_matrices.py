"""Matrices of all experts in one tensor, read in parts; tokens of such files are held to
transformers' in test_mxfp4_models.py and test_hybrid_tokens.py."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sgl_pipeline.errors import CheckpointError
from sgl_pipeline.pp_runner.made_up_weights import MadeUpWeights
from sgl_pipeline.pp_runner.weights.checkpoint import Checkpoint, DummyWeights, WeightSource
from sgl_pipeline.pp_runner.weights.paced_weights import PacedWeights
from sgl_pipeline.pp_runner.weights.quantization_config import read_quantization
from sgl_pipeline.pp_runner.weights.quantized_weights import Int8Weight, Matrix, Mxfp4Weight
from sgl_pipeline.pp_runner.weights.rounding import to_int8
from sgl_pipeline.pp_runner.weights.schemes import Int8Scheme
from sgl_pipeline.pp_runner.weights.stacked_matrices import read_plain_stack, read_stacked_matrices

NAME = "model.layers.3.mlp.experts.down_proj"
Tensors = dict[str, torch.Tensor]


def test_made_up_experts_have_four_bits_if_the_config_says_so() -> None:
    quantization = read_quantization({"quant_method": "mxfp4"}, "lm_head")
    weights = DummyWeights(torch.bfloat16, torch.device("cpu"))
    packed = list(read_stacked_matrices(weights, quantization, NAME, (3, 40, 64)))
    plain = list(read_stacked_matrices(weights, None, NAME, (3, 40, 64)))
    for weight, matrix in zip(packed, plain, strict=True):
        assert isinstance(weight, Mxfp4Weight) and isinstance(matrix, torch.Tensor)
        assert weight.shape == matrix.shape == (40, 64) and matrix.is_contiguous()
        # Half of the widest gap, 2, of numbers whose largest lies between 4 and 8.
        errors = (weight.dequantized() - matrix.float()).abs()
        assert float(errors.max()) <= 0.5 * float(matrix.abs().max())


def test_only_experts_are_in_four_bits() -> None:
    quantization = read_quantization({"quant_method": "mxfp4"}, "lm_head")
    assert quantization is not None
    assert quantization.scheme_of(NAME) is not None
    for name in ("lm_head", "model.layers.3.mlp.router", "model.layers.3.self_attn.q_proj"):
        assert quantization.scheme_of(name) is None


def test_experts_are_copied_out_of_their_stack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = DummyWeights(torch.bfloat16, torch.device("cpu"))
    for matrix in read_plain_stack(weights, None, NAME, (3, 40, 64)):
        assert isinstance(matrix, torch.Tensor)
        assert matrix.untyped_storage().nbytes() == matrix.nbytes  # the stack may go
    clones = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda own: clones.append(own) or clone(own))
    assert len(list(read_plain_stack(weights, Int8Scheme(), NAME, (3, 40, 64)))) == 3
    assert not clones


EXPERTS, OUTPUTS, INPUTS = 64, 512, 1024
QUANTIZATION = read_quantization({"quant_method": "mxfp4"}, "lm_head")
KINDS: dict[str, Callable[[WeightSource], Iterator[Matrix]]] = {
    "outputs first": lambda source: read_plain_stack(
        source, None, "plain", (EXPERTS, OUTPUTS, INPUTS)
    ),
    "outputs first, int8": lambda source: read_plain_stack(
        source, Int8Scheme(), "plain", (EXPERTS, OUTPUTS, INPUTS)
    ),
    "inputs first": lambda source: read_stacked_matrices(
        source, None, "plain", (EXPERTS, INPUTS, OUTPUTS)
    ),
    "mxfp4": lambda source: read_stacked_matrices(
        source, QUANTIZATION, NAME, (EXPERTS, OUTPUTS, INPUTS)
    ),
}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A checkpoint of 81 MiB, and its tensors."""
    generator = torch.Generator().manual_seed(0)
    groups = (EXPERTS, OUTPUTS, INPUTS // 32)
    tensors = {
        "plain": torch.randn(EXPERTS, OUTPUTS, INPUTS, generator=generator).bfloat16(),
        f"{NAME}_blocks": torch.randint(
            0, 256, (*groups, 16), dtype=torch.uint8, generator=generator
        ),
        f"{NAME}_scales": torch.randint(120, 125, groups, dtype=torch.uint8, generator=generator),
    }
    directory = tmp_path_factory.mktemp("stacks")
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors


def own_memory() -> int:
    """Bytes of this process that are in no file."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_never_in_memory_whole(kind: str, stacks: tuple[Path, Tensors]) -> None:
    source = Checkpoint(stacks[0], torch.bfloat16, torch.device("cpu"))
    whole = stacks[1][f"{NAME}_blocks" if kind == "mxfp4" else "plain"].nbytes
    gc.collect()
    before, peak, read = own_memory(), 0, 0
    for matrix in KINDS[kind](source):
        peak = max(peak, own_memory() - before)
        read += matrix.nbytes
    assert peak < whole / 3
    assert sum(source.loaded.values()) == read


def test_parts_are_what_the_whole_holds(stacks: tuple[Path, Tensors]) -> None:
    directory, tensors = stacks
    source = Checkpoint(directory, torch.bfloat16, torch.device("cpu"))
    found = {kind: [*read(source)] for kind, read in KINDS.items()}
    blocks, scales = tensors[f"{NAME}_blocks"], tensors[f"{NAME}_scales"]
    for expert, plain in enumerate(tensors["plain"]):
        assert torch.equal(found["outputs first"][expert], plain)
        assert torch.equal(found["inputs first"][expert], plain.T)
        rounded, packed = found["outputs first, int8"][expert], found["mxfp4"][expert]
        assert isinstance(rounded, Int8Weight) and isinstance(packed, Mxfp4Weight)
        assert torch.equal(rounded.values, to_int8(plain).values)
        assert torch.equal(packed.packed, blocks[expert].flatten(1))
        assert torch.equal(packed.scales, scales[expert])


def test_parts_of_another_shape_are_refused(stacks: tuple[Path, Tensors]) -> None:
    source = Checkpoint(stacks[0], torch.bfloat16, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"plain has shape \[64, 512, 1024\]"):
        next(read_plain_stack(source, None, "plain", (EXPERTS, INPUTS, OUTPUTS)))


@pytest.mark.parametrize("made_up", [DummyWeights, MadeUpWeights])
def test_made_up_parts_count_as_one_tensor(
    made_up: Callable[[torch.dtype, torch.device], WeightSource],
) -> None:
    source = made_up(torch.bfloat16, torch.device("cpu"))
    matrices = [*read_plain_stack(source, None, NAME, (3, 40, 64))]
    assert source.loaded == {NAME: sum(matrix.nbytes for matrix in matrices)}
    [*read_plain_stack(source, Int8Scheme(), NAME, (3, 40, 64))]
    assert source.loaded == {NAME: 3 * (40 * 64 + 40 * 4)}


def test_loading_pauses_between_parts(stacks: tuple[Path, Tensors]) -> None:
    pauses: list[None] = []
    checkpoint = Checkpoint(stacks[0], torch.bfloat16, torch.device("cpu"))
    source = PacedWeights(checkpoint, lambda: pauses.append(None))
    assert len([*read_plain_stack(source, None, "plain", (EXPERTS, OUTPUTS, INPUTS))]) == EXPERTS
    assert len(pauses) == EXPERTS + 1
