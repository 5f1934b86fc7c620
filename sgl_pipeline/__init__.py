"""sgl_pipeline: a pipeline-parallel LLM serving runtime on top of SGLang."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`sgl_pipeline.Engine`, imported when it is asked for; `__init__.pyi` has its type."""
    if name == "Engine":
        return importlib.import_module("sgl_pipeline.engine").Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
