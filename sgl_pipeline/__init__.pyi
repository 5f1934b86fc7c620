from sgl_pipeline.engine import Engine as Engine

__version__: str
