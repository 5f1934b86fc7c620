"""Writes a tiny Qwen3.5 of random weights for servers: three layers of four keep a state."""

from pathlib import Path

import torch
from support.front_model import VOCAB_SIZE, byte_tokenizer
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig


def write_state_model(directory: Path) -> Path:
    """Writes it into `directory`; weights in fp32."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
