"""`python -m sgl_pipeline`: the server, as `python -m sgl_pipeline.launch_server`.

`python -m sgl_pipeline plan` shows what layer splits are like, and starts none.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        from sgl_pipeline.managers.planning.plan_command import main

        sys.exit(main(sys.argv[2:]))
    from sgl_pipeline.launch_server import run_and_exit

    run_and_exit()
