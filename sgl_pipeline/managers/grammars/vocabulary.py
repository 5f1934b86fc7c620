"""The facts about the served model that grammars need: its tokens as text, its EOS, and how it
thinks.

They are read by the scheduler process at its start. A tokenizer that xgrammar cannot read never
stops the server: then each request with a grammar gets that error.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import xgrammar
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sgl_pipeline.managers.command_line.model_files import ModelLimits
from sgl_pipeline.managers.grammars.text_tokens import TextTokens


@dataclass(frozen=True, slots=True)
class GrammarVocabulary:
    """`size` is that of the model's logits. Tokens without text in the tokenizer are never allowed.
    `think_end_ids`: the tokens that end the model's thinking, or none."""

    tokenizer_info: xgrammar.TokenizerInfo
    size: int
    text_tokens: TextTokens
    think_end_ids: tuple[int, ...] = ()


class NoGrammarsError(Exception):
    """Raised, with the reason, when no grammar can be used with this model or these flags."""


def read_vocabulary(
    tokenizer: Any, limits: ModelLimits, reasoning_parser: str | None
) -> GrammarVocabulary:
    """The vocabulary of the model that `tokenizer` and `limits` belong to.

    Args:
        reasoning_parser: upstream's `--reasoning-parser`.

    Raises NoGrammarsError.
    """
    eos_token_ids = sorted(
        token for token in limits.eos_token_ids if 0 <= token < limits.vocab_size
    )
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=limits.vocab_size, stop_token_ids=eos_token_ids
        )
    except Exception as error:
        raise NoGrammarsError(
            f"structured output is not available: xgrammar cannot use this tokenizer ({error})"
        ) from error
    text_tokens = TextTokens(
        partial(tokenizer.encode, add_special_tokens=False),
        lambda: info.decoded_vocab,
        frozenset(info.special_token_ids) | frozenset(info.stop_token_ids),
    )
    think_end_ids = _think_end_ids(tokenizer, reasoning_parser)
    return GrammarVocabulary(info, limits.vocab_size, text_tokens, think_end_ids)


def _think_end_ids(tokenizer: Any, reasoning_parser: str | None) -> tuple[int, ...]:
    if not reasoning_parser:
        return ()
    parser = ReasoningParser(
        model_type=reasoning_parser, stream_reasoning=False, tokenizer=tokenizer
    )
    detector = parser.detector
    # These let a request choose how thinking ends, or frame the answer with tokens of their own.
    is_special = getattr(detector, "request_selectable_think_end_tokens", None)
    if is_special or detector.get_answer_frame() is not None:
        raise NoGrammarsError(
            f"structured output with --reasoning-parser {reasoning_parser}: not supported by this "
            "server yet"
        )
    return tuple(detector.get_think_end_token_ids(tokenizer) or ())
