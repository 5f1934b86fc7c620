"""The entry `python -m sgl_pipeline.migration.fit`; the command is in `managers/planning/`.

Of the entry files, like `launch_server.py`: this room itself starts no process and writes no file.
"""

import sys

from sgl_pipeline.managers.planning.fit_command import main

if __name__ == "__main__":
    sys.exit(main())
