"""A server whose main process can start no further worker while a file exists: its source refuses.

python test/support/server_without_workers.py FILE [flags of launch_server]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sgl_pipeline import launch_server
from sgl_pipeline.managers.stages.stage_processes import StageProcesses


def main(drought: Path) -> None:
    start_another = StageProcesses.start_another

    def refuse(self: StageProcesses, worker: int) -> int | None:
        if drought.exists():
            raise OSError(f"{drought.name} exists")
        return start_another(self, worker)

    StageProcesses.start_another = refuse  # type: ignore[method-assign]
    launch_server.run_and_exit()


if __name__ == "__main__":
    main(Path(sys.argv.pop(1)))
