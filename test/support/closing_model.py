"""A checkpoint that always prefers to close what is open: for grammars that only a model can end.

Every layer passes its input on, so that the logits are the same at every position: the end of turn
first, then the closing marks, digits, a space (which closes a word), and letters.
"""

import shutil
import string
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sgl_pipeline.managers.command_line.model_files import DEMO_MODEL

_CLOSING = '"}])>,:'
_VOCAB_SIZE = 320
_HIDDEN_SIZE = 64


def write_closing_model(directory: Path) -> Path:
    """Writes it to `directory`, with the demo model's tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=_HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    preferred = [tokenizer.eos_token_id, *(tokenizer.encode(mark)[0] for mark in _CLOSING)]
    scores = torch.zeros(_VOCAB_SIZE)
    for score, texts in ((200.0, "0123456789"), (150.0, " "), (100.0, string.ascii_lowercase)):
        scores[tokenizer.encode(texts)] = score
    for rank, token_id in enumerate(preferred):
        scores[token_id] = 1000.0 - 50.0 * rank
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name or "embed" in name:
                parameter.fill_(1.0)
        model.lm_head.weight.copy_((scores / _HIDDEN_SIZE)[:, None].expand(-1, _HIDDEN_SIZE))
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    return directory
