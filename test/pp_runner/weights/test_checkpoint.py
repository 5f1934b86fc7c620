"""Checkpoints that are whole, sharded, truncated, or not what the config says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sgl_pipeline import model_directory
from sgl_pipeline.errors import CheckpointError, ConfigurationError
from sgl_pipeline.model_directory import INDEX_FILE, SINGLE_FILE
from sgl_pipeline.pp_runner.weights.checkpoint import Checkpoint, weight_opener

CPU = torch.device("cpu")
ALPHA = torch.arange(6.0).view(2, 3)
BETA = torch.arange(4.0)


@pytest.fixture
def single(tmp_path):
    save_file({"alpha": ALPHA, "beta": BETA, "ids": torch.arange(4)}, tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_file({"alpha": ALPHA}, tmp_path / "one.safetensors")
    save_file({"beta": BETA}, tmp_path / "two.safetensors")
    weight_map = {"alpha": "one.safetensors", "beta": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def opened(path, dtype=torch.float32):
    return weight_opener(path, "safetensors", dtype, CPU)()


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_a_tensor_is_read_in_the_dtype_asked_for_and_reported(layout, request):
    weights = opened(request.getfixturevalue(layout), torch.bfloat16)
    assert weights.has("alpha") and not weights.has("gamma")
    assert torch.equal(weights.read("alpha", (2, 3)), ALPHA.bfloat16())
    assert weights.loaded == {"alpha": 12}


def test_a_tensor_outlives_its_file(single):
    alpha = opened(single).read("alpha", (2, 3))
    (single / SINGLE_FILE).write_bytes(b"")
    assert torch.equal(alpha, ALPHA)


def test_a_shard_that_is_not_asked_for_is_not_opened(sharded):
    (sharded / "two.safetensors").unlink()
    weights = opened(sharded)
    assert torch.equal(weights.read("alpha", (2, 3)), ALPHA)
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing"):
        weights.read("beta", (4,))


@pytest.mark.parametrize("kept_bytes", [0, 5, 40, -1])
def test_a_truncated_file_is_named(single, kept_bytes):
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        opened(single)


def test_a_header_of_nonsense_is_an_error_that_names_the_file(single):
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:8] + b"?" * 400)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        opened(single)


def test_a_directory_without_weights_names_the_file_that_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        opened(tmp_path)


def test_a_missing_tensor_and_its_expected_shape_are_named(single):
    with pytest.raises(CheckpointError, match=r"no tensor gamma .*\[7, 8\]"):
        opened(single).read("gamma", (7, 8))


def test_a_wrong_shape_names_file_tensor_expected_and_found(single):
    with pytest.raises(CheckpointError) as error:
        opened(single).read("alpha", (3, 2))
    for named in (str(single / SINGLE_FILE), "alpha", "[3, 2]", "[2, 3]"):
        assert named in str(error.value)


def test_integers_are_no_weights(single):
    with pytest.raises(CheckpointError, match=r"tensor ids .*torch\.int64"):
        opened(single).read("ids", (4,))


def test_an_index_that_names_an_absent_tensor_is_an_error(sharded):
    weight_map = {"gamma": "one.safetensors"}
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors: tensor gamma"):
        opened(sharded).read("gamma", (1,))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_faulty_index_is_named(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index"):
        Checkpoint(tmp_path, torch.float32, CPU)


def test_an_index_may_not_lead_out_of_the_directory(sharded):
    weight_map = {"alpha": "../one.safetensors"}
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="outside"):
        opened(sharded)


def test_dummy_weights_depend_on_the_name_alone(tmp_path):
    opener = weight_opener(tmp_path, "dummy", torch.float32, CPU)
    first, second = opener(), opener()
    first.read("other", (5,))
    assert torch.equal(first.read("alpha", (2, 3)), second.read("alpha", (2, 3)))
    assert not torch.equal(first.read("beta", (2, 3)), second.read("alpha", (2, 3)))
    assert (first.read("model.norm.weight", (4,)) == 1.0).all()
    assert first.loaded["alpha"] == 24


def test_an_unknown_load_format_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigurationError, match=r"npcache.*safetensors, gguf and dummy"):
        weight_opener(tmp_path, "npcache", torch.float32, CPU)


def test_the_index_is_read_once_and_no_file_stays_open(sharded, monkeypatch):
    """Whoever kept a file mapped would be killed when it is cut short."""
    opener = weight_opener(sharded, "safetensors", torch.float32, CPU)
    monkeypatch.setattr(model_directory.json, "loads", lambda text: pytest.fail("it was read"))
    for _ in range(3):
        source = opener()
        assert torch.equal(source.read("alpha", (2, 3)), ALPHA)
        assert source.loaded == {"alpha": 24}
        del source
        mapped = Path("/proc/self/maps").read_text()
        assert str(sharded) not in mapped
