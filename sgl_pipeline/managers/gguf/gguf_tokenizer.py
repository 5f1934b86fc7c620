"""The tokenizer of a GGUF file, as files that SGLang's front loads.

transformers converts it. What its table passes over is completed here: how the vocabulary wants
text cut, whether a prompt begins with a mark, and whether a whole word that is a token needs no
merges. A vocabulary that neither knows how to cut is refused, because with another cut the model
would see other tokens than it was trained with.
"""

from pathlib import Path
from typing import Any

from sgl_pipeline.errors import UnsupportedModelError
from sgl_pipeline.managers.gguf.gguf_file import GgufFile

# llama.cpp's names (`llm_load_vocab`) of cuts that transformers' table does not have: GPT-2's own,
# and the same with each digit alone.
_GPT2_CUT = frozenset({"gpt-2"})
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
# Llama 3's and Mistral's byte-level vocabularies: a word that is a token is not merged, and a
# prompt begins with a mark where the file does not say.
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
_KNOB = "name a tokenizer's directory with --tokenizer-path"


def write_tokenizer(file: GgufFile, directory: Path) -> None:
    """Writes tokenizer.json and its companions, chat template included.

    Raises UnsupportedModelError where the file has no tokenizer, or one that is not known.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    kind, cut = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind is None:
        raise UnsupportedModelError(f"{file.path} holds no tokenizer; {_KNOB}")
    if kind == "gpt2":
        _refuse_unknown_cut(file, cut)
    try:
        architecture, content, settings = get_gguf_tokenizer(str(file.path))
        backend, _ = convert_gguf_tokenizer(architecture, content)
    # A vocabulary that makes no sense fails anywhere in transformers or in Rust below it.
    except Exception as error:
        raise UnsupportedModelError(
            f"{file.path}: its tokenizer cannot be converted: {error!r}; {_KNOB}"
        ) from None
    if kind == "gpt2":
        _complete_byte_level(backend, cut)
    begins = file.metadata.get("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = kind == "llama" or cut in _WHOLE_WORDS
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=bool(begins) and settings.get("bos_token") is not None,
        clean_up_tokenization_spaces=False,
        **settings,
    ).save_pretrained(directory)


def _refuse_unknown_cut(file: GgufFile, cut: Any) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    known = {*GGUF_PRE_TOKENIZER_SPLITS} | _GPT2_CUT | _DIGITS_APART
    if cut not in known:
        raise UnsupportedModelError(
            f"{file.path} says tokenizer.ggml.pre = {cut!r}, and how such a tokenizer cuts text is "
            f"not known; {_KNOB}"
        )


def _complete_byte_level(backend: Any, cut: str) -> None:
    from tokenizers import pre_tokenizers

    if cut in _DIGITS_APART:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if cut in _WHOLE_WORDS:
        backend.model.ignore_merges = True
