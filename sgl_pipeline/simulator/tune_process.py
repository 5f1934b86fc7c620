"""`python -m sgl_pipeline.simulator.tune_process`: one `TuneTask` in, one `Proposal` out.

Started by the HTTP server's process for `POST /pipeline/tune` (`managers/entrance/tuning.py`), with
the task on its standard input and the answer on its standard output, both msgpack. It has the
lowest priority there is, one thread, and ends with its parent.
"""

import argparse
import os
import sys

import msgspec

from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.process_lifetime import die_with_parent

NICENESS = 19


def main() -> int:
    """Entry of the process; exit code 2 and a line of text for a task that cannot be done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    die_with_parent(parser.parse_args().parent)
    os.nice(NICENESS)
    # Not before: it imports numpy.
    from sgl_pipeline.simulator.propose import TuneTask, propose

    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TuneTask)
    try:
        proposal = propose(task)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 2
    sys.stdout.buffer.write(msgspec.msgpack.encode(proposal))
    return 0


if __name__ == "__main__":
    sys.exit(main())
