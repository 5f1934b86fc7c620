import json
from pathlib import Path

import pytest
from support.front_model import CONTEXT_LENGTH, VOCAB_SIZE, byte_tokenizer, write_front_model
from support.gguf_files import write_gguf
from support.tiny_models import tiny_model

from sgl_pipeline.errors import CheckpointError, ConfigurationError
from sgl_pipeline.managers.command_line import model_files
from sgl_pipeline.managers.command_line.model_files import find_model, model_limits, resolve_dtype
from sgl_pipeline.model_directory import weight_format
from sgl_pipeline.pp_runner.model.model_spec import read_model_spec


def test_a_directory_is_served_from_where_it_lies(tmp_path: Path) -> None:
    assert find_model(str(write_front_model(tmp_path)), None, None) == str(tmp_path)


@pytest.mark.parametrize(
    "name", ["/no/such/path", "./missing", "a b c", "~/nowhere/at/all", "/dev/null"]
)
def test_a_path_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        find_model(name, None, None)


def test_a_directory_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        find_model(str(tmp_path), None, None)


def test_a_hub_id_that_cannot_be_fetched_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refuses every look-up without asking the network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="could not be fetched"):
        find_model("nobody/no-such-model", None, str(tmp_path))


def test_no_model_means_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "DEMO_MODEL", write_front_model(tmp_path))
    assert find_model(None, None, None) == str(tmp_path)
    monkeypatch.setattr(model_files, "DEMO_MODEL", tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="demo model"):
        find_model(None, None, None)


@pytest.mark.parametrize(
    ("asked", "checkpoint", "dtype"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16"),
        ("half", "bfloat16", "float16"),
        ("float", "bfloat16", "float32"),
    ],
)
def test_dtype_auto_is_that_of_the_checkpoint(asked: str, checkpoint: str, dtype: str) -> None:
    assert resolve_dtype(asked, checkpoint) == dtype


def test_a_dtype_that_cannot_be_computed_in_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="float8"):
        resolve_dtype("auto", "float8_e4m3fn")


def test_eos_ids_are_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    write_front_model(tmp_path, eos_token_id=[0, 7])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    tokenizer = byte_tokenizer()
    tokenizer.additional_stop_token_ids = {11}
    limits = model_limits(read_model_spec(tmp_path), None, tokenizer)
    assert limits.eos_token_ids == {0, 7, 9, 2, 11}
    assert (limits.context_length, limits.vocab_size) == (CONTEXT_LENGTH, VOCAB_SIZE)


def test_context_length_can_be_set(tmp_path: Path) -> None:
    write_front_model(tmp_path)
    assert model_limits(read_model_spec(tmp_path), 64, byte_tokenizer()).context_length == 64


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("field", ["vocab_size", "eos_token_id"])
def test_a_config_with_a_field_of_the_wrong_type_is_named(tmp_path: Path, field: str) -> None:
    write_front_model(tmp_path, **{field: "many"})
    with pytest.raises(ConfigurationError, match=field):
        read_model_spec(tmp_path)


def test_a_directory_with_gguf_files_is_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    path = write_gguf(tiny_model("llama"), folder / "tiny.gguf")
    found = find_model(str(folder), None, None)
    assert found == find_model(str(path), None, None) == find_model(found, None, None)
    assert {weight_format("auto", one) for one in (folder, path, found)} == {"gguf"}
    with pytest.raises(ConfigurationError, match="leave the flag out for a GGUF file"):
        find_model(str(path), None, None, "safetensors")
    (folder / "model.safetensors").touch()
    assert weight_format("auto", folder) == "safetensors"
    assert find_model(str(folder), None, None, "gguf") == found
    (folder / "other.gguf").touch()
    with pytest.raises(ConfigurationError, match=r"holds other\.gguf, tiny\.gguf; name a file"):
        find_model(str(folder), None, None, "gguf")


def test_a_file_that_is_no_gguf_file_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        find_model(str(tmp_path / "notes.txt"), None, None)
    with pytest.raises(ConfigurationError, match="does not exist; name a GGUF file"):
        find_model("Qwen/Qwen3-0.6B", None, None, "gguf")
