"""A model directory as the front sees it: config, tokenizer and chat template, no weights.

Every byte is a token, so that tests can read token ids as text, and text as token ids.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2
VOCAB_SIZE = 320
CONTEXT_LENGTH = 256
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Three special tokens, then one token for each byte. EOS is <|im_end|>, id 2."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {text: token for token, text in enumerate(special + sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=_TEMPLATE
    )


def write_front_model(directory: Path, **config: object) -> Path:
    """Writes the model to `directory`; `config` adds to or replaces fields of config.json."""
    byte_tokenizer().save_pretrained(directory)
    fields = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": END_OF_TEXT,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(fields | config), encoding="utf-8")
    return directory
