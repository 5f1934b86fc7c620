"""sgl_pipeline: a pipeline-parallel LLM serving runtime on top of SGLang."""

__version__ = "0.1.0"
