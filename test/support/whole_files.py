"""The order in which pytest-xdist deals files of tests to its workers."""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class WholeFiles(LoadFileScheduling):
    """Whole files to a worker of pytest, and all files of the folder `together` to one worker:
    their tests share servers, which each worker would start for itself."""

    def __init__(self, config: pytest.Config, log: Any, together: str) -> None:
        super().__init__(config, log)
        self._together = together

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return self._together if file.startswith(self._together) else file
