"""Keeps upstream's start messages off the terminal, where ours are.

Upstream logs all of its arguments (7 KB), its phases, and warnings of kernels that are not used
here. They are shown with `--log-level debug` only. Once the server is ready, all of upstream's
messages are shown.
"""

import logging

# Upstream's warnings that do not matter here, by their logger.
_IRRELEVANT = {
    # Upstream has no pools here.
    "sglang.srt.arg_groups.model_overrides.exaone": "hybrid SWA memory",
    "sglang.srt.arg_groups.model_overrides.gemma2_gemma3": "hybrid SWA memory",
    "sglang.srt.arg_groups.model_overrides.olmo2": "hybrid SWA memory",
    "sglang.srt.utils.common": "Fail to set RLIMIT_NOFILE",  # the limit stays as the user set it
    "sglang.srt.entrypoints.openai.serving_rerank": "Using fallback token IDs",  # reranks nothing
}
_SERVER_LOGGERS = ("uvicorn.error", "uvicorn.access")
_UPSTREAM = "sglang"


def _matters(record: logging.LogRecord) -> bool:
    return _IRRELEVANT[record.name] not in record.getMessage()


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def begin() -> None:
    """To be called before sglang is imported, and again before the end; holds for the processes
    that are forked later too."""
    logging.getLogger(_UPSTREAM).setLevel(logging.WARNING)
    for name in _SERVER_LOGGERS:
        logging.getLogger(name).addFilter(_is_warning)
    for name in _IRRELEVANT:
        logging.getLogger(name).addFilter(_matters)


def end() -> None:
    """Shows upstream's messages again: the server is ready, or `--log-level debug` asks for
    everything."""
    logging.getLogger(_UPSTREAM).setLevel(logging.NOTSET)
    for name in _SERVER_LOGGERS:
        logging.getLogger(name).removeFilter(_is_warning)
