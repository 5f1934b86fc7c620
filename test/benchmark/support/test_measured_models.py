"""Models by the names of `--model`, and the texts that are asked of them."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmark.models.fetch_model import MODELS
from benchmark.models.make_model import FIRST_FILLER, PRESETS, write_tokenizer
from benchmark.support import measured_models
from benchmark.support.measured_models import measured_model, page_texts


def test_random_weights_are_asked_with_fillers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_models, "make_model", lambda preset: tmp_path / preset)
    model = measured_model("tiny")
    assert (model.path, model.directory, model.page_ids) == (tmp_path / "tiny",) * 2 + (None,)
    last = PRESETS["tiny"].vocab_size - 1
    beyond = last - FIRST_FILLER + 1
    assert model.texts([beyond - 1, beyond]) == f"<{last}><{FIRST_FILLER}>"


def test_copies_of_a_published_file_lie_beside_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_tokenizer(1000, tmp_path)
    monkeypatch.setattr(measured_models, "fetch_model", lambda name: tmp_path / "file.gguf")
    (name,) = MODELS
    model = measured_model(name)
    assert (model.path, model.directory) == (tmp_path, tmp_path)
    assert model.page_ids is not None and len(model.page_ids) > 10_000


def test_engines_and_clients_name_a_relative_directory_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "some"
    model.mkdir()
    (model / "config.json").write_text("{}")
    write_tokenizer(1000, model)
    monkeypatch.chdir(tmp_path)
    named = measured_model("some")
    assert (named.path, named.directory) == (model, model)


def test_a_text_is_a_run_of_the_pages(tmp_path: Path) -> None:
    write_tokenizer(1000, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("One page.").ids
    texts = page_texts(tokenizer, ids)
    assert texts(range(4)) == "One " and texts(range(len(ids) - 2, len(ids) + 3)) == "e.One"
