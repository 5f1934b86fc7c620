"""The treatment of each of SGLang's server arguments: a table, and nothing but the table.

A test walks upstream's fields: each is HONORED by our own processes, handed to the FRONT
(upstream's HTTP server, TokenizerManager or Detokenizer, where it keeps its meaning), NOTED by a
line about its replacement here, or refused at start when it differs from its default. None may be
ignored without a word.
"""

from dataclasses import dataclass
from typing import Any

from sgl_pipeline.args.scheduling_args import TRACK_INTERVAL

# `sleep_on_idle` is always so: the scheduler process waits for its sockets.
HONORED = frozenset(
    """
    model_path model_impl revision download_dir load_format dtype quantization kv_cache_dtype
    context_length json_model_override_args device
    random_seed pp_size pp_max_micro_batch_size pp_async_batch_depth
    nnodes node_rank dist_init_addr use_ray page_size
    chunked_prefill_size
    max_total_tokens mem_fraction_static
    max_running_requests max_queued_requests max_mamba_cache_size mamba_full_memory_ratio
    mamba_track_interval
    disable_radix_cache stream_interval sleep_on_idle
    schedule_policy enable_dynamic_chunking
    enable_priority_scheduling schedule_low_priority_values_first
    abort_on_priority_when_disabled disable_priority_preemption
    priority_scheduling_preemption_threshold
    disable_cuda_graph
    enable_hierarchical_cache hicache_storage_backend hicache_storage_backend_extra_config
    hicache_write_policy hicache_storage_prefetch_policy hicache_ratio hicache_size
    speculative_algorithm speculative_num_draft_tokens
    grammar_backend constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
    enable_metrics extra_metric_labels enable_trace otlp_traces_endpoint
    disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
    num_reserved_decode_tokens
    """.split()
)

FRONT = frozenset(
    """
    tokenizer_path tokenizer_mode tokenizer_backend
    enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
    disable_tokenizer_batch_decode
    host port fastapi_root_path skip_server_warmup warmups api_key admin_api_key
    ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh
    served_model_name weight_version chat_template trust_request_chat_template
    hf_chat_template_name completion_template default_chat_template_kwargs
    reasoning_parser tool_call_parser tool_server enable_response_store
    sampling_defaults preferred_sampling_params allow_auto_truncate
    enable_cache_report return_input_ids return_output_ids batch_notify_size
    stream_response_default_include_usage incremental_streaming_output
    asr_max_buffer_seconds asr_max_concurrent_sessions default_priority_value
    log_level log_level_http log_requests log_requests_level log_requests_format
    log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder
    gc_warning_threshold_secs gc_threshold soft_watchdog_timeout
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
    prompt_tokens_buckets generation_tokens_buckets
    trace_modules otlp_service_name
    """.split()
)

# Arguments of both sides that mean nothing without an HTTP server: an engine refuses them.
SERVER_ONLY = frozenset(
    """
    host port fastapi_root_path skip_server_warmup warmups api_key admin_api_key
    ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh
    chat_template trust_request_chat_template hf_chat_template_name completion_template
    default_chat_template_kwargs tool_call_parser tool_server enable_response_store
    sampling_defaults stream_response_default_include_usage
    asr_max_buffer_seconds asr_max_concurrent_sessions log_level_http
    uvicorn_access_log_exclude_prefixes tokenizer_metrics_custom_labels_header
    tokenizer_metrics_allowed_custom_labels enable_metrics extra_metric_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency
    prompt_tokens_buckets generation_tokens_buckets
    enable_trace otlp_traces_endpoint otlp_service_name trace_modules
    nnodes node_rank dist_init_addr use_ray ray_wait_s host_silence_s cluster_key_file
    disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
    num_reserved_decode_tokens disaggregation_decode_fallback
    enable_attention_offload attention_offload_ratio
    ui drain_timeout_s config fair_shares_by tenant_weights
    """.split()
)


@dataclass(frozen=True, slots=True)
class Note:
    """`text` describes the behavior here for any value; `values` are accepted, None: any. Upstream
    gets its default. Only for arguments that can change no answer and no guarantee."""

    text: str
    values: frozenset[Any] | None = None

    def takes(self, value: object) -> bool:
        return self.values is None or value in self.values


# The same attention by other kernels. Upstream's other choices are sparse, latent or of diffusion
# models.
_SAME_ATTENTION = frozenset(
    """triton torch_native flex_attention fa3 fa4 flashinfer trtllm_mha hpc_ops aiter wave
    intel_amx ascend intel_xpu""".split()
)
_ATTENTION = Note("--stage-attention-backend chooses the stages' kernels", _SAME_ATTENTION)
_HOST_TIER = Note(
    "pages go between the stages' pools and one tier, which is host memory or a store, as they lie "
    "in the pool"
)
_LOOKUPS = Note("a store is asked once for a request, before its turn, and not in polls")
_GRAPHS = Note("the stages choose the sizes of their CUDA graphs; see --stage-graphs")

# A flag that tunes a mechanism of upstream's, where we do by default what it does by default.
NOTED = {
    "attention_backend": _ATTENTION,
    "prefill_attention_backend": _ATTENTION,
    "decode_attention_backend": _ATTENTION,
    "cuda_graph_max_bs_decode": _GRAPHS,
    "cuda_graph_max_bs_prefill": _GRAPHS,
    "disable_overlap_schedule": Note(
        "the scheduler is a process of its own, and decides steps while stages compute others"
    ),
    "enable_mixed_chunk": Note("a step may always have decodes and prefill chunks together"),
    "schedule_conservativeness": Note(
        "a request is admitted when its whole prefill fits, and retracted when pages run out"
    ),
    "max_prefill_tokens": Note("--chunked-prefill-size and the policy bound the prefill of a step"),
    "watchdog_timeout": Note(
        "a stage that dies or hangs is replaced; see --stage-recovery and --stage-silence-s"
    ),
    "trust_remote_code": Note(
        "code from a model repository is never run; a model or tokenizer that needs it does not "
        "load"
    ),
    "hicache_host_memory_mode": _HOST_TIER,
    "hicache_host_memory_fraction": _HOST_TIER,
    "hicache_io_backend": _HOST_TIER,
    "hicache_mem_layout": _HOST_TIER,
    "hicache_storage_prefetch_retry_poll_interval": _LOOKUPS,
    "hicache_storage_prefetch_retry_max_attempts": _LOOKUPS,
    "moe_dense_tp_size": Note("no layer is split over devices", frozenset({1})),
    "disaggregation_decode_enable_radix_cache": Note(
        "a decode server always has its radix cache, and loads only the pages that it lacks"
    ),
    "disaggregation_decode_polling_interval": Note("the end of a transfer is an event, not polled"),
    "disaggregation_enable_kv_checksum": Note("every page that crosses has a checksum (CRC-32)"),
    "disaggregation_decode_retraction_backup": Note(
        "a retracted request loads its pages from a store, or computes them again",
        frozenset({"cpu_tensor", "host_pool"}),
    ),
    "disaggregation_decode_allocation_policy": Note(
        "a decode server takes pages for a request when its prefill is complete"
    ),
    "disaggregation_decode_extra_slots": Note(
        "requests on their way have no slots: pages and the bounds of the queue hold them back"
    ),
    "optimistic_prefill_attempts": Note(
        "a prefill server computes at once, whether a decode server has asked or not"
    ),
}

# Flags of upstream's whose help would say something else, and what it says here.
HELP = {
    "model_impl": "Whose code computes the layers: sglang (ours, for the families in its table), "
    "transformers (the code of the transformers package, for families whose attention it can "
    "route here), or auto (ours where it can, else transformers').",
    "pp_max_micro_batch_size": "Most decodes of a step, under any policy; prefill is bounded by "
    "--chunked-prefill-size.",
    "speculative_algorithm": "NGRAM: decodes carry guesses at their next tokens, looked up in the "
    "request's own prompt and output, where a step has time for them. No token changes.",
    "max_mamba_cache_size": "State slots of a model with states: a running request owns one, and "
    "cached prefixes take what is left (default: 3 times --max-running-requests, once with "
    "--disable-radix-cache, or as many as fit).",
    "mamba_full_memory_ratio": "Memory for states to memory for pages, without "
    "--max-mamba-cache-size (default: 0.9).",
    "mamba_track_interval": "Tokens after which a decode of a model with states leaves a snapshot "
    "of its state for the prefix cache, again and again, and keeps the last; whole pages, 0: none "
    "(default: 256).",
    "speculative_num_draft_tokens": "Most tokens of a decode in a step, its own and the guesses "
    "behind it (default: 12).",
    "pp_async_batch_depth": "Steps in flight beyond one per stage, as --extra-steps-in-flight.",
}

# Upstream's argument namespaces of which nothing outside the two sets above is supported.
REFUSED_NAMESPACES = {
    "parallel": "the pipeline (--pp) is the only parallelism; upstream runs at 1",
    "spec": "of speculative decoding, --speculative-algorithm NGRAM is built: one chain of tokens, "
    "from the request's own prompt and output, of at most --speculative-num-draft-tokens",
    "lora": "LoRA adapters are not built yet",
    "mm": "only text is served, also of multimodal models",
    "exec.comm": "it tunes upstream's tensor-parallel communication, which is not used",
    "exec.deterministic": "it steers upstream's model runner, which is not used; greedy and seeded "
    "sampling do not depend on the microbatch here",
    "exec.dllm": "diffusion language models are not supported",
    "exec.features": "it switches a feature of upstream's model runner, which is not used",
    "exec.graph": "it steers the graphs of upstream's model runner, which is not used; the stages' "
    "own are switched by --stage-graphs, and torch.compile is not built",
    "exec.kernel": "it picks a kernel of upstream's model runner, which is not used; the stages' "
    "own choice is --stage-attention-backend",
    "exec.mamba": "it tunes upstream's pools of states, which are not used; the number of state "
    "slots is --max-mamba-cache-size, and states are of 32 bits",
    "exec.moe": "it tunes the experts of upstream's model runner, which is not used; a layer's "
    "experts run on its stage",
    "exec.offload": "offloading weights is not built yet",
    "exec.overlap": "it tunes upstream's model runner, which is not used",
}

_GRPC = "the gRPC front is not supported; use HTTP"
_ONE_TOKENIZER = "one tokenizer and one detokenizer process are supported"
_QUANTIZATION = "of weights see --quantization, of keys and values --kv-cache-dtype"
_WEIGHTS = (
    "weights are read from local files by each stage, safetensors or GGUF; no other source is built"
)
_REMOTE_CODE = "code from a model repository is never run; see --model-impl"
_WHITESPACE = "xgrammar has no such pattern; see --constrained-json-max-whitespace-cnt"
_METRICS = "only the metrics of --enable-metrics are built; --trace-path writes a record per step"
_DEBUG = "it debugs upstream's model runner, which is not used"
_DEVICE = "stages take the visible devices in order; choose with CUDA_VISIBLE_DEVICES"
_OTHER_ATTENTION = "it is for models with another attention, which are not supported"
_POLICY = "upstream's scheduler is not used; see --policy and the throttle's options"
_PREFILL = "prefill is bounded by --chunked-prefill-size and the throttle's options"
_SLIDING = "sliding-window attention is not supported"
_POOLS = "it lays out the pools of upstream's model runner, which is not used"
_STORE = (
    "it replaces upstream's radix cache, which is not used; stages read and write a store of their "
    "own: --enable-hierarchical-cache --hicache-storage-backend file"
)
_ENCODER = "only text is served, and no encoder is apart"
_DECOUPLED = "drafts are looked up by the scheduler, and no server makes them for another"
_MULTIPLEXED = (
    "it splits a GPU between prefill and decode; here a step has both, and --policy bounds prefill"
)
_LINK = (
    "it is for RDMA; page_link uses TCP, at the address that the router gives of a prefill server, "
    "and its port"
)
_OFFLOAD = (
    "a store keeps what is decoded: --enable-hierarchical-cache --hicache-storage-backend file"
)
_EVICTION = "the radix cache evicts the least recently used pages first, and nothing else"

_REFUSED_TEXT = {
    _GRPC: """smg_grpc_mode grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs
        sidecar sidecar_args smg_http_sidecar_port""",
    "HTTP/2 is not supported; use HTTP/1.1": """enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size""",
    _ONE_TOKENIZER: "tokenizer_worker_num detokenizer_worker_num enable_http_worker_reuseport",
    "stop strings and replies need the tokenizer": "skip_tokenizer_init",
    "sessions are not built yet": "enable_streaming_session enable_session_radix_cache",
    "thinking budgets are not built yet": "enable_strict_thinking strip_thinking_cache",
    "nothing in this server stores files": "file_storage_path",
    _WHITESPACE: "constrained_json_whitespace_pattern",
    _METRICS: """enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval decode_log_interval enable_request_time_stats_logging
        kv_events_config load_publish_endpoint enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name export_metrics_to_file
        export_metrics_to_file_dir stat_loggers show_time_cost""",
    _DEBUG: """kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_layers
        debug_tensor_dump_output_folder debug_tensor_dump_input_file forward_hooks
        msprobe_dump_config""",
    _DEVICE: "base_gpu_id gpu_id_step numa_node",
    "it belongs to another platform": "mlx_enable_sampling",
    "the server's own exit path must run": "custom_sigquit_handler",
    _REMOTE_CODE: "model_config_parser",
    "only text generation is served": "is_embedding",
    _QUANTIZATION: """quantization_param_path modelopt_quant
        modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        quantize_and_serve rl_quant_profile qsa_indexer_dtype""",
    _WEIGHTS: """model_loader_extra_config startup_weight_load_mode custom_weight_loader
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config model_checksum delete_ckpt_after_loading decrypted_config_file
        decrypted_draft_config_file checkpoint_engine_wait_weights_before_ready weight_cache_mode
        weight_cache_socket weight_cache_timeout""",
    _OTHER_ATTENTION: """attention_backend prefill_attention_backend decode_attention_backend
        enable_hisparse hisparse_config""",
    _POLICY: """retraction_policy num_continuous_decode_steps scheduler_recv_interval
        min_free_slots_delay""",
    _PREFILL: """prefill_max_requests prefill_decode_interval
        prefill_decode_interval_min_bs disable_chunked_prefix_cache
        prefill_only_disable_kv_cache enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms""",
    _SLIDING: """swa_full_tokens_ratio disable_hybrid_swa_memory swa_prefix_tails
        _swa_full_tokens_ratio_explicitly_set c128_page_size""",
    _EVICTION: """radix_eviction_policy radix_eviction_policy_config radix_cache_backend
        _radix_eviction_policy_explicitly_set""",
    _ENCODER: """encoder_only language_only language_model_only encoder_transfer_backend
        encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder""",
    _DECOUPLED: """decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints
        decoupled_spec_rank decoupled_spec_role""",
    _MULTIPLEXED: "enable_pdmux pdmux_config_path sm_group_num",
    _LINK: "disaggregation_ib_device",
    _OFFLOAD: "disaggregation_decode_enable_offload_kvcache",
    "pages arrive in the pool; --max-total-tokens is its size": """
        disaggregation_decode_host_receive_threshold""",
    "a role lasts as long as the server; start another one with --disaggregation-mode": """
        enable_pd_role_switch""",
    "retracted requests go on here, and no client has to ask again": """
        disaggregation_decode_retraction_backup""",
    _POOLS: "enable_page_major_kv_layout enable_unified_memory",
    _STORE: """enable_unified_cache_external_linker unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache
        lmcache_config_file enable_flexkv flexkv_config_file""",
}

# Field name -> why a value other than the default is refused.
REFUSED_FIELDS = {name: reason for reason, names in _REFUSED_TEXT.items() for name in names.split()}

# Values that upstream itself gets, for any command line. It resolves and runs its front as a CPU
# server without a pipeline; it never sees the two sizes that only our scheduler uses (it would
# demand that one divides the other); it looks for no kernels for quantized weights, keys or values;
# of a multimodal model it takes the text model and the plain tokenizer; of its attentions the one
# that no family's checks refuse, and no pools of its own for windows; it has no tiers, with
# which it would refuse some families; usage always reports cached tokens; and it learns of the
# server's role and of drafts later (`tell_role`, `tell_drafts`).
UPSTREAM_VALUES = {
    "model_impl": "auto",
    "enable_multimodal": False,
    "attention_backend": "triton",
    "disable_hybrid_swa_memory": True,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "pp_size": 1,
    "pp_max_micro_batch_size": None,
    "pp_async_batch_depth": 0,
    "nnodes": 1,
    "node_rank": 0,
    "dist_init_addr": None,
    "use_ray": False,
    "device": "cpu",
    "page_size": None,
    "chunked_prefill_size": None,
    "max_mamba_cache_size": None,
    "mamba_full_memory_ratio": None,
    "mamba_track_interval": TRACK_INTERVAL,
    "enable_hierarchical_cache": False,
    "enable_cache_report": True,
    "disaggregation_mode": "null",
    "disaggregation_transfer_backend": "mooncake",
    "speculative_algorithm": None,
    "speculative_num_draft_tokens": None,
}


def refusal(name: str, namespace: str) -> str | None:
    """The reason why field `name` of upstream's `namespace` must keep its default, or None; for a
    NOTED field with `values`, why it must have one of them."""
    if name in HONORED or name in FRONT or (name in NOTED and NOTED[name].values is None):
        return None
    return REFUSED_FIELDS.get(name) or REFUSED_NAMESPACES.get(namespace)
