"""The families whose tokens the tests compare with those of transformers' `generate`."""

# By the `model_type` of the text model.
TESTED_MODEL_TYPES = frozenset(
    """
    apertus cohere2 deepseek_v3 ernie4_5_moe exaone4 gemma gemma2 gemma3_text gemma4_text
    glm4_moe glm4_moe_lite gpt_oss granite granitemoe hunyuan_v1_dense hy_v3 laguna llama
    mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral olmo2 olmo3 olmoe phi3
    qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_text seed_oss smollm3 starcoder2
    """.split()
)
