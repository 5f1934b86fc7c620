"""A checkpoint that says what a script makes it say, to serve replies that no tiny model can learn.

Used to test upstream's parsers of tool calls and reasoning behind our scheduler and stages. The
weights are made, not trained: the next token follows from the token before it and, where several
scripts share that one, from which script's marker the prompt holds. The first layer's attention
averages over the prompt which markers it saw; everything else is a table in the head.
"""

import re
import tempfile
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, USER, ASSISTANT, THINK, THOUGHT = "<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>"
_CALL = '<tool_call>\n{"name": "%s", "arguments": {%s}}\n</tool_call>'
THOUGHTS = {
    "": "One and three make four.",
    "[weather]": "The user asks for the weather, so I call the tool.",
    "[two calls]": "Two cities, two calls!",
    "[no such tool]": "I make a tool up...",
    "[endless]": "I wonder and wonder, and I never stop wondering. " * 4,
}
# Marker in the prompt -> what is said after the thoughts. Without one it is the first.
ANSWERS = {
    "": "It is 4.",
    "[weather]": "I look it up." + _CALL % ("get_weather", '"city": "Paris", "days": 3'),
    "[two calls]": _CALL % ("get_weather", '"city": "Oslo"')
    + "\n"
    + _CALL % ("get_time", '"zone": "Europe/Rome", "short": true'),
    "[no such tool]": _CALL % ("launch_missiles", '"now": true'),
    "[endless]": "That was long.",
}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|assistant|>' if message.role == 'assistant' else '<|user|>' -}}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- elif message.content -%}"
    "{%- for part in message.content -%}{{ part.text }}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if tools -%}{{- '<|user|>' + tools | tojson + '<|end|>' -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think></think>' -}}"
    "{%- endif -%}{%- endif -%}"
)
_MARKERS = [ASSISTANT, *list(ANSWERS)[1:]]
# Shared by the scripts; a marker takes one id each.
_SPECIAL = [END, USER, *_MARKERS]
# A prompt ends with ASSISTANT, so the first script needs no marker; the others outweigh it.
_MARKER_WEIGHTS = [1.0, *([16.0] * (len(_MARKERS) - 1))]
# Far above what a script adds, so that the token before decides, and the script only among equals.
_FOLLOWS, _BELONGS = 1e7, 1e4
_PIECE_LENGTH = 4
_HEAD_DIM = 16


class _Vocabulary:
    """Ids of specials, bytes and pieces. A piece is the text of one token of one script."""

    def __init__(self) -> None:
        self.ids = {text: token for token, text in enumerate([*_SPECIAL, THINK, THOUGHT])}
        for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
            self.ids[symbol] = len(self.ids)

    def pieces(self, text: str) -> list[int]:
        """New ids for `text`, cut into pieces that no other script has. A call's mark begins one,
        because no tokenizer of a model that calls tools joins it with the text before it."""
        ids = []
        for part in re.split("(?=<tool_call>)", text):
            pieces = _cut(_byte_symbols(part), frozenset(self.ids)) if part else []
            assert pieces is not None, f"{part!r} has no pieces of its own"
            ids += [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]
        return ids


def _cut(text: str, taken: frozenset[str]) -> list[str] | None:
    """`text` in short pieces, none twice and none of them `taken`; None where there are none."""
    if not text:
        return []
    for length in range(_PIECE_LENGTH, len(text) + 1):
        piece = text[:length]
        if piece not in taken and (rest := _cut(text[length:], taken | {piece})) is not None:
            return [piece, *rest]
    return None


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="sgl_pipeline_parrot_")


@cache
def parrot_model() -> Path:
    """The directory of the checkpoint, with its tokenizer; written once per test session."""
    directory = Path(_session_directory().name)
    vocabulary = _Vocabulary()
    scripts = [
        [
            vocabulary.ids[THINK],
            *vocabulary.pieces(THOUGHTS[name]),
            vocabulary.ids[THOUGHT],
            *vocabulary.pieces(ANSWERS[name]),
            vocabulary.ids[END],
        ]
        for name in ANSWERS
    ]
    _tokenizer(vocabulary).save_pretrained(directory)
    _model(vocabulary, scripts).save_pretrained(directory)
    return directory


def _byte_symbols(text: str) -> str:
    """`text` as a byte-level vocabulary spells it."""
    ((symbols, _),) = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return symbols


def _tokenizer(vocabulary: _Vocabulary) -> PreTrainedTokenizerFast:
    """Prompts are encoded byte by byte, because no merge makes a piece."""
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    # Not special, as in Qwen3's tokenizer: a reply shows them.
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (THINK, THOUGHT)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def _model(vocabulary: _Vocabulary, scripts: list[list[int]]) -> LlamaForCausalLM:
    """One coordinate of the residual stream for each token, and one for each script."""
    num_tokens, num_scripts = len(vocabulary.ids), len(scripts)
    hidden = num_tokens + _HEAD_DIM
    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=vocabulary.ids[END],
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.model.embed_tokens.weight[:, :num_tokens] = torch.eye(num_tokens)
        first = model.model.layers[0].self_attn
        for script in range(num_scripts):
            marker = vocabulary.ids[_MARKERS[script]]
            # Queries are zero, so every token is attended to alike.
            first.v_proj.weight[script, marker] = _MARKER_WEIGHTS[script] / hidden**0.5
            first.o_proj.weight[num_tokens + script, script] = 1.0
        _fill_head(model.lm_head.weight, vocabulary, scripts)
    return model


def _fill_head(head: torch.Tensor, vocabulary: _Vocabulary, scripts: list[list[int]]) -> None:
    num_tokens = len(vocabulary.ids)
    for script, tokens in enumerate(scripts):
        for before, token in zip([vocabulary.ids[ASSISTANT], *tokens[:-1]], tokens, strict=True):
            head[token, before] = _FOLLOWS
            head[token, num_tokens + script] = _BELONGS
