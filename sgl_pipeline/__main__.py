"""`python -m sgl_pipeline`: the same as `python -m sgl_pipeline.launch_server`."""

from sgl_pipeline.launch_server import run_and_exit

if __name__ == "__main__":
    run_and_exit()
