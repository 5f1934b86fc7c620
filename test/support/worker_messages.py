"""What workers say, with numbers to check against."""

from sgl_pipeline import __version__
from sgl_pipeline.messages import StageLoaded, StageReady, WorkerHello


def hello(
    worker: int, *, host: str = "here", cores: tuple[int, ...] = (0, 1), num_gpus: int = 0
) -> WorkerHello:
    return WorkerHello(
        worker=worker,
        host=host,
        cores=cores,
        num_gpus=num_gpus,
        memory_bytes=2**34,
        version=__version__,
    )


def loaded(stage: int, num_pages: int = 10) -> StageLoaded:
    return StageLoaded(
        stage=stage, num_pages=num_pages, weight_bytes=1000, page_bytes=100, load_seconds=0.5
    )


def ready(stage: int, *notices: str) -> StageReady:
    return StageReady(stage, "torch", "cpu", notices)
