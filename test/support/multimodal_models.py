"""Tiny seeded checkpoints of multimodal models, of which the text model is served.

They are written as their publishers have them: the whole model, vision tower included, and the
text model's sizes inside `text_config`.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from support.front_model import VOCAB_SIZE, byte_tokenizer
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen3VLConfig,
)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_WINDOWED = {"sliding_window": 12}
# Beyond the ids of the byte tokenizer.
_IMAGE = {"image_token_id": 310, "video_token_id": 311}
_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gemma3": (
        Gemma3Config,
        {
            "text_config": {**_TEXT, **_WINDOWED, "query_pre_attn_scalar": 16},
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 310,
            "boi_token_index": 311,
            "eoi_token_index": 312,
        },
    ),
    "gemma4": (
        Gemma4Config,
        {
            "text_config": {
                **_TEXT,
                **_WINDOWED,
                "global_head_dim": 32,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "enable_moe_block": False,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            "audio_config": None,
            "image_token_id": 310,
            "video_token_id": 311,
            "audio_token_id": 313,
            "boi_token_id": 312,
        },
    ),
    "mistral3": (
        Mistral3Config,
        {
            "text_config": {**_TEXT, "model_type": "ministral3"},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
            "image_token_index": 310,
        },
    ),
    "qwen3-vl": (
        Qwen3VLConfig,
        {
            "text_config": {
                **_TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 32,
                "depth": 1,
                "num_heads": 2,
                "patch_size": 14,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **_IMAGE,
            "vision_start_token_id": 312,
            "vision_end_token_id": 313,
        },
    ),
}
MULTIMODAL = tuple(_CONFIGS)


@cache
def multimodal_model(name: str) -> Path:
    """The directory of the checkpoint `name`, written once for all tests of a process."""
    config_class, fields = _CONFIGS[name]
    config = config_class(**fields)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    directory = Path(tempfile.mkdtemp(prefix="sgl_pipeline_multimodal_")) / name
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
