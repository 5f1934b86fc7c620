"""The entry of a stage worker: `python -m sgl_pipeline.pp_runner.stage_process`.

As a process of its own it starts at the very start of a server, and binds its life to the parent's
before it imports torch, which takes seconds in which Ctrl-C or a wrong flag may end the server;
hence nothing heavy at the top. On CPUs a fork enters it that has the imports
(`managers/stages/worker_nursery.py`). A worker's work is `stage_worker.py`.
"""

import argparse
import faulthandler
import sys
from collections.abc import Sequence

from sgl_pipeline.process_lifetime import DUMP_SIGNAL, die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker of `argv`, by default the command line's; the exit code is 0 after a
    Shutdown, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--address", required=True, help="of the scheduler: ipc://PATH, or the head's cluster port"
    )
    parser.add_argument("--worker", required=True, type=int, help="number of this worker")
    parser.add_argument("--parent", type=int, help="process id of the parent to end with")
    parser.add_argument("--run-directory", required=True, help="of this host's processes")
    parser.add_argument("--host-address", default="", help="cluster port of this host")
    parser.add_argument("--model-path", default="", help="where this host has the model")
    options = parser.parse_args(argv)
    if options.parent is not None:
        die_with_parent(options.parent)
    # The scheduler asks a silent stage for the stacks of its threads, which go to stderr.
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    from sgl_pipeline.pp_runner.stage_worker import run_worker
    from sgl_pipeline.pp_runner.worker_hello import WorkerSite

    site = WorkerSite(options.run_directory, options.host_address, options.model_path)
    return run_worker(options.address, options.worker, site)


if __name__ == "__main__":
    sys.exit(main())
