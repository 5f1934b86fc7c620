"""The tokenizer of a GGUF file gives the ids that the vocabulary was made for."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import write_gguf
from support.tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.managers.gguf.gguf_directory import add_tokenizer, gguf_directory

TEXT = "Item 12:\n\n3 cats  and 45 dogs; don't\n  6 <|end|> mind"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


def trained(cut: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)


def loaded(tmp_path: Path, tokenizer: Tokenizer, **changes: Any) -> Any:
    """What AutoTokenizer finds in the model directory of a file with this vocabulary."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if one[:2] == "<|" else 1 for one in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", metadata=metadata | named)
    directory = gguf_directory(path)
    add_tokenizer(directory)
    add_tokenizer(directory)  # which finds it
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("pre", "cut"), [("smollm", DIGITS), ("gpt-2", PLAIN)])
def test_text_is_cut_as_the_vocabulary_wants(
    pre: str, cut: pre_tokenizers.PreTokenizer, tmp_path: Path
) -> None:
    source = trained(cut)
    tokenizer = loaded(tmp_path, source, pre=pre)
    assert tokenizer(TEXT)["input_ids"] == source.encode(TEXT).ids
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|begin|>")
    messages = [{"role": "user", "content": "cats"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "cats<|end|>"


def test_the_two_cuts_differ_for_this_text() -> None:
    assert trained(DIGITS).encode(TEXT).tokens != trained(PLAIN).encode(TEXT).tokens


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"pre": "gpt-2"}, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_a_prompt_begins_with_a_mark_where_the_file_or_its_kind_says_so(
    changes: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    ids = loaded(tmp_path, trained(PLAIN), **changes)("cats")["input_ids"]
    assert (ids[0] == 1) == begins


@pytest.mark.parametrize("changes", [{"pre": "martian"}, {"pre": None}, {"model": "rwkv"}])
def test_a_tokenizer_that_is_not_known_is_refused_with_the_knob(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="with --tokenizer-path"):
        loaded(tmp_path, trained(PLAIN), **{"pre": "gpt-2"} | changes)


def test_merges_that_make_no_sense_are_a_message(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be converted"):
        loaded(tmp_path, trained(PLAIN), pre="gpt-2", merges=["no such", "x"])
