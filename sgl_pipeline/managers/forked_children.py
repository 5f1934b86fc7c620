"""Starts upstream's scheduler and detokenizer processes as forks of the main process.

Upstream starts them afresh, and each imports SGLang again: eight seconds of a core and half a
gigabyte, both of which a fork shares. Must never be used while this process has a thread that could
hold a lock, nor where it may have touched a GPU, which a fork could not go on using.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.http_server import (
    _execute_server_warmup,
    _setup_and_run_http_server,
)

# The first child runs this, and the engine has imported what the second one does.
import sgl_pipeline.managers.scheduler_process  # noqa: F401


class ForkingEngine(Engine):
    """Upstream's engine, whose children are forked."""

    @classmethod
    def _launch_scheduler_processes(cls, *arguments: Any, **more: Any) -> Any:
        """Upstream's override point for other ways to start the children (`ray/engine.py` uses it);
        it is called right before the first of them."""
        multiprocessing.set_start_method("fork", force=True)
        return super()._launch_scheduler_processes(*arguments, **more)


def launch_server_forking(
    server_args: Any,
    *,
    init_tokenizer_manager_func: Callable[..., Any],
    run_scheduler_process_func: Callable[..., Any],
    run_detokenizer_process_func: Callable[..., Any],
    launch_callback: Callable[[], None],
) -> None:
    """As upstream's `http_server.launch_server`, on one host; returns when the server has ended."""
    tokenizer_manager, templates, ports, started, watchdog, _ = ForkingEngine._launch_subprocesses(
        server_args,
        init_tokenizer_manager_func=init_tokenizer_manager_func,
        run_scheduler_process_func=run_scheduler_process_func,
        run_detokenizer_process_func=run_detokenizer_process_func,
    )
    _setup_and_run_http_server(
        server_args,
        tokenizer_manager,
        templates,
        ports,
        started.scheduler_infos,
        watchdog,
        execute_warmup_func=_execute_server_warmup,
        launch_callback=launch_callback,
    )
