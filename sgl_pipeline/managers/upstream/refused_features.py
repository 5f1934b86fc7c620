"""Upstream's features that we refuse, by the routes of its server and the methods of its Engine.

Imports nothing: an engine's program reads it, without sglang.
"""

_MEMORY = "releasing memory at run time"
_EXPERTS = "recording expert distributions"
# Upstream holds back every new request until all running ones have ended, and asks only then.
_WEIGHTS = "changing weights at run time"
_EMBEDDINGS = "embeddings, classification and reranking"
_SESSIONS = "sessions"
_SPEECH = "speech recognition"
REFUSED_ROUTES = {
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/slow_down": "slowing down on purpose",
    "/start_expert_distribution_record": _EXPERTS,
    "/stop_expert_distribution_record": _EXPERTS,
    "/dump_expert_distribution_record": _EXPERTS,
    "/update_weights_from_disk": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/begin_weight_update": _WEIGHTS,
    "/end_weight_update": _WEIGHTS,
    "/open_session": _SESSIONS,
    "/close_session": _SESSIONS,
    "/encode": _EMBEDDINGS,
    "/classify": _EMBEDDINGS,
    "/v1/embeddings": _EMBEDDINGS,
    "/v1/classify": _EMBEDDINGS,
    "/v1/rerank": _EMBEDDINGS,
    "/v1/audio/transcriptions": _SPEECH,
    "/set_internal_state": "changing scheduler settings at run time",
}

_LORA = "LoRA adapters"
_RANKS = "a call of every rank"
# Methods of upstream's Engine: those that have a route of their name, and others.
REFUSED_METHODS = {path.removeprefix("/"): feature for path, feature in REFUSED_ROUTES.items()} | {
    "async_encode": _EMBEDDINGS,
    "rerank": _EMBEDDINGS,
    "init_weights_update_group": _WEIGHTS,
    "destroy_weights_update_group": _WEIGHTS,
    "get_weights_by_name": "reading weights at run time",
    "load_lora_adapter": _LORA,
    "load_lora_adapter_from_tensors": _LORA,
    "unload_lora_adapter": _LORA,
    "async_load_lora_adapter": _LORA,
    "async_unload_lora_adapter": _LORA,
    "collective_rpc": _RANKS,
    "save_remote_model": _RANKS,
    "save_sharded_model": _RANKS,
    "attach_tokenizer_worker": "more than one tokenizer",
}


def refusal_of(feature: str) -> str:
    """The message of a refusal."""
    return f"{feature}: not supported by this server yet"
