"""Tokenizer and chat template of the demo model, one token per letter and digit.

`train.py` uses it to encode conversations and to export `tokenizer.json`; tests may build it too.
It must never join two letters or two digits into one token, because the demo tasks (spelling,
reversing, adding) are only learnable by so small a model when it sees every character.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD_TOKEN, BEGIN_TOKEN, END_TOKEN = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS: tuple[str, ...] = (
    PAD_TOKEN, BEGIN_TOKEN, END_TOKEN, SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN,
)  # fmt: skip
END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = 2, 3, 4, 5
CONTEXT_TOKEN_LIMIT = 32_768

# Content may be a plain string or OpenAI's list of parts, of which only the text parts count.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}
{%- elif part.text is defined -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set first_is_system = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools and not first_is_system -%}
{{- '<|system|>Tools: ' + (tools if tools is string else tools | tojson) + '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
{{- '<|system|>' + text_of(message.content) -}}
{%- if tools and loop.first -%}
{{- ' Tools: ' + (tools if tools is string else tools | tojson) -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + text_of(message.content) + '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|user|>Tool result: ' + text_of(message.content) + '<|end|>' -}}
{%- else -%}
{{- '<|user|>' + text_of(message.content) + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Return the byte-level tokenizer: ids 0-5 special, then the 256 bytes, no merges."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Return the contents of `tokenizer_config.json`, chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "unk_token": None,
        "additional_special_tokens": [BEGIN_TOKEN, SYSTEM_TOKEN, USER_TOKEN, ASSISTANT_TOKEN],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKEN_LIMIT,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
