"""A stage of a generic model reads its own tensors and no others, quantized where the model is."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.generic_families import VOCAB_SIZE, generated, generic_model, trace_once
from support.multimodal_models import MULTIMODAL, multimodal_model
from support.quantized_models import FORMATS, quantized_model, write_config
from support.stage_chain import StageChain, new_request
from support.tiny_models import tiny_model

from sgl_pipeline.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from sgl_pipeline.pp_runner.layer_kernels.torch_kernels import TorchKernels
from sgl_pipeline.pp_runner.model.generic.generic_stage import GenericStageModel
from sgl_pipeline.pp_runner.model.generic.probe import probe
from sgl_pipeline.pp_runner.model.generic.spec import GenericSpec
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec
from sgl_pipeline.pp_runner.stage_model_choice import load_stage_model
from sgl_pipeline.pp_runner.worker_hello import WorkerSite, worker_hello

PROMPT = [11 * place % VOCAB_SIZE for place in range(17)]


@pytest.fixture(autouse=True)
def one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_once(monkeypatch)


@cache
def spec_of(path: Path) -> GenericSpec:
    return probe(path)


def load(path: Path, layers: range, **arguments: Any) -> Any:
    return load_stage_model(
        arguments.pop("spec", None) or spec_of(path),
        path,
        layers=layers,
        dtype=torch.float32,
        device=torch.device("cpu"),
        kernels=TorchKernels(),
        **{"is_first": False, "is_last": False, **arguments},
    )


def test_the_stages_of_a_model_read_each_tensor_once() -> None:
    path = generic_model("mixtral")
    stages = [
        load(path, range(1), is_first=True),
        load(path, range(1, 3)),
        load(path, range(3, 4), is_last=True),
    ]
    tensors = load_file(path / "model.safetensors")
    names = [name for stage in stages for name in stage.loaded]
    assert sorted(names) == sorted(tensors)
    assert sum(stage.weight_bytes for stage in stages) == sum(t.nbytes for t in tensors.values())
    assert stages[1].largest_layer_bytes == stages[1].weight_bytes // 2
    assert all(stage.has_experts for stage in stages)


def test_a_tied_head_is_the_embedding_of_the_first_stage_or_read_on_the_last() -> None:
    path = generic_model("qwen2")
    table = "model.embed_tokens.weight"
    assert table in load(path, range(2), is_first=True).loaded
    assert table in load(path, range(2, 4), is_last=True).loaded
    assert table not in load(path, range(1, 3)).loaded


def test_a_stage_takes_another_ones_place() -> None:
    """Layers and ends change as when stages are fewer; the tokens are those of a fresh stage."""
    path = generic_model("glm4-moe")
    chain = StageChain(path, (4,), spec=probe(path))
    wanted = chain.generate(new_request(PROMPT), 6)
    stage = load(path, range(2), is_first=True)
    before = stage.layers[1]
    read: list[None] = []
    stage.take_over(range(1, 4), is_first=False, is_last=True, on_layer=lambda: read.append(None))
    assert stage.layers[1] is before and sorted(stage.layers) == [1, 2, 3] and len(read) == 2
    assert not stage.is_first and "model.embed_tokens.weight" not in stage.loaded
    stage.take_over(range(4), is_first=True, is_last=True)
    assert stage.weight_bytes == chain.stages[0].weight_bytes
    chain.stages[0].__dict__.update(stage.__dict__)
    assert chain.generate(new_request(PROMPT), 6) == wanted


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    path = shutil.copytree(generic_model("llama"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    load(path, range(2))
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_proj"):
        load(path, range(1, 3))


def test_a_tensor_that_the_code_does_not_use_is_refused(tmp_path: Path) -> None:
    path = shutil.copytree(generic_model("llama"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"k_norm.*does not use"):
        load(path, range(2))


def test_made_up_weights_need_no_files(tmp_path: Path) -> None:
    shutil.copy(generic_model("gpt-oss") / "config.json", tmp_path)
    whole, cut = (
        StageChain(tmp_path, counts, spec=probe(tmp_path), load_format="dummy")
        for counts in ((4,), (1, 3))
    )
    assert whole.generate(new_request(PROMPT), 4) == cut.generate(new_request(PROMPT), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_checkpoint_is_served(name: str) -> None:
    path = multimodal_model(name)
    chain = StageChain(path, (2, 4), spec=probe(path))
    assert chain.generate(new_request(PROMPT), 6, 5) == generated(path, PROMPT, 6)
    names = [one for stage in chain.stages for one in stage.loaded]
    assert not [one for one in names if "vis" in one or "projector" in one]


@pytest.mark.slow
@pytest.mark.parametrize("format_name", FORMATS)
def test_quantized_checkpoints_give_the_logits_of_our_own_layers(format_name: str) -> None:
    path = quantized_model(format_name).path
    chains = [StageChain(path, (6,), spec=spec) for spec in (probe(path), read_model_spec(path))]
    requests = [new_request(PROMPT) for _ in chains]
    for chain, request in zip(chains, requests, strict=True):
        chain.generate(request, 1)
    generic, native = (
        chain.logits[request][0] for chain, request in zip(chains, requests, strict=True)
    )
    # Rows that are rounded may fall to the other side: our own layers round after other sums.
    most = 2e-2 if FORMATS[format_name].rounds_rows else 1e-4
    assert float((generic - native).norm() / native.norm()) < most
    assert chains[0].stages[0].weight_bytes == chains[1].stages[0].weight_bytes


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-tied-sharded"])
def test_sixteen_bits_are_rounded_as_asked(name: str) -> None:
    path = tiny_model(name)
    spec, native = probe(path, "w8a8_int8"), read_model_spec(path, "w8a8_int8")
    chains = [StageChain(path, (2, 4), spec=one) for one in (spec, native)]
    sizes = [[stage.weight_bytes for stage in chain.stages] for chain in chains]
    assert sizes[0] == sizes[1]
    requests = [new_request(PROMPT) for _ in chains]
    rows = []
    for chain, request in zip(chains, requests, strict=True):
        chain.generate(request, 1)
        rows.append(chain.logits[request][0])
    assert float((rows[0] - rows[1]).norm() / rows[1].norm()) < 5e-2


def test_stacked_experts_are_not_quantized() -> None:
    path = generic_model("gpt-oss")
    with pytest.raises(UnsupportedModelError, match="several experts at once"):
        load(path, range(1), spec=probe(path, "w8a8_int8"))


def test_a_quantization_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--quantization gptq"):
        probe(generic_model("llama"), "gptq")


def test_scales_of_keys_and_values_are_refused(tmp_path: Path) -> None:
    path = shutil.copytree(quantized_model("int-quantized").path, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    write_config(path, config | {"kv_cache_scheme": scheme})
    with pytest.raises(UnsupportedModelError, match="scales for keys and values"):
        probe(path)


def test_a_buffer_that_is_not_made_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = generic_model("llama")
    spec = probe(path)
    monkeypatch.setattr("transformers.PreTrainedModel._init_weights", lambda self, module: None)
    with pytest.raises(UnsupportedModelError, match=r"the buffer rotary_emb\.\w*inv_freq"):
        load(path, range(1), spec=spec)


def test_the_spec_chooses_the_code() -> None:
    path = tiny_model("llama")
    assert isinstance(load(path, range(1)), GenericStageModel)
    assert not isinstance(load(path, range(1), spec=read_model_spec(path)), GenericStageModel)


def test_a_worker_says_which_transformers_it_has() -> None:
    assert worker_hello(0, WorkerSite("run")).transformers == transformers.__version__


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_worker_of_another_model_does_not_import_transformers() -> None:
    code = (
        "import sys, sgl_pipeline.pp_runner.stage_worker;"
        "import sgl_pipeline.pp_runner.stage_model_choice;"
        "sys.exit('transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
