"""The upstream arguments that our processes read, after upstream has resolved them.

As `upstream_messages.py` for messages, and held to upstream's classes by the same test.
`upstream_fields.py` lists the treatment of all other arguments.
"""

from typing import Protocol


class SglangServerArgs(Protocol):
    """The command line (upstream: `ServerArgs`)."""

    host: str
    port: int
    api_key: str | None
    admin_api_key: str | None
    served_model_name: str | None
    log_level: str
    model_path: str
    revision: str | None
    context_length: int | None
    tokenizer_path: str | None
    tokenizer_mode: str
    tokenizer_backend: str
    tool_call_parser: str | None
    completion_template: str | None
    random_seed: int | None
    stream_interval: int
    enable_priority_scheduling: bool
    schedule_low_priority_values_first: bool
    abort_on_priority_when_disabled: bool
    enable_metrics: bool
    enable_trace: bool
    otlp_traces_endpoint: str
    otlp_service_name: str | None
    trace_modules: str
    extra_metric_labels: dict[str, str] | None

    def url(self) -> str:
        """The address at which clients reach the server."""


class SglangPortArgs(Protocol):
    """Addresses of upstream's sockets, which the front binds (upstream: `PortArgs`)."""

    scheduler_input_ipc_name: str
    detokenizer_ipc_name: str
    tokenizer_ipc_name: str
