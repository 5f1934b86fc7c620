"""SGLang's router for tests, unmodified: in a folder of its own (`make test-alone` installs
requirements/router.txt there), or on Python's path."""

import importlib.util
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.find_spec("sglang_router")
FOLDER = Path(_SPEC.origin).parents[1] if _SPEC and _SPEC.origin else Path(sys.prefix) / "router"
NEEDS_ROUTER = [
    pytest.mark.alone,
    pytest.mark.multiproc,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "sglang_router").is_dir(),
        reason=f"SGLang's router is not installed in {FOLDER}; `make test-alone` does it",
    ),
]
