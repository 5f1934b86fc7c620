"""Random-weight checkpoints: read by transformers and by our own loader, and the same each time."""

import pytest
import torch
from support.greedy_oracle import count_ties
from support.hybrid_stages import HybridStages
from support.stage_chain import StageChain, new_request
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmark.models.make_model import END_ID, PRESETS, main, make_model
from sgl_pipeline.pp_runner.model.model_spec import model_spec


@pytest.mark.parametrize("name", ["tiny", "tiny-tied", "tiny-moe"])
def test_transformers_and_our_layers_read_the_same_model(tmp_path, name):
    make_model(PRESETS[name], tmp_path / "model", dtype="float32")
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
    num_layers = PRESETS[name].num_hidden_layers
    chain = StageChain(tmp_path / "model", (1, num_layers - 1))
    request = new_request([5, 17, 300, 44])
    chain.generate(request, 1)
    with torch.inference_mode():
        expected = model(torch.tensor([request.prompt_ids])).logits[0, -1]
    torch.testing.assert_close(chain.logits[request][0], expected, atol=1e-4, rtol=1e-4)


def test_transformers_and_our_layers_read_the_same_model_with_states(tmp_path):
    path = tmp_path / "model"
    make_model(PRESETS["tiny-hybrid"], path, dtype="float32")
    _, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])
    stages = HybridStages(path, (1, 3))
    request = stages.open([5, 17, 300, 44], 0)
    stages.finish(request, 3, 8)
    assert count_ties(path, request.prompt_ids, request.output_ids) < 4


def test_every_id_decodes_and_fillers_encode_to_themselves(tmp_path):
    make_model(PRESETS["tiny"], tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.vocab_size == len(tokenizer) == PRESETS["tiny"].vocab_size
    assert all(tokenizer.decode([number]) for number in range(tokenizer.vocab_size))
    fillers = list(range(500, 512)) + list(range(259, 300))
    assert tokenizer.encode(tokenizer.decode(fillers)) == fillers
    text = "Hello wörld, 17 <5> \N{GRINNING FACE}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|begin|>user: hi<|end|><|begin|>assistant: "
    )


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    contents = []
    for directory, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model(PRESETS["tiny-tied"], tmp_path / directory, seed)
        contents.append((tmp_path / directory / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_the_benchmark_presets_have_the_sizes_they_are_named_after():
    dense, wide, sparse, hybrid = (
        sum(torch.Size(shape).numel() for shape in PRESETS[name].tensor_shapes().values())
        for name in ("0.27b", "0.52b-152k", "0.34b-moe", "0.45b-hybrid")
    )
    spec = model_spec(PRESETS["0.27b"].config("bfloat16"))
    assert (spec.num_layers, spec.head_dim, spec.vocab_size) == (16, 64, 32_000)
    assert dense == pytest.approx(0.27e9, rel=0.02)
    assert wide == pytest.approx(0.52e9, rel=0.02)
    assert sparse == pytest.approx(0.34e9, rel=0.02)
    assert hybrid == pytest.approx(0.45e9, rel=0.02)
    config = PRESETS["0.45b-hybrid"].config("bfloat16")
    spec = model_spec(config)
    assert [one is not None for one in spec.states] == 4 * [True, True, True, False]
    assert spec.states[0].bytes_per_slot("bfloat16") == pytest.approx(2.05 * 2**20, rel=0.01)
    assert config["eos_token_id"] == END_ID


def test_a_directory_that_holds_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text("mine")
    assert main(["tiny", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "mine"
