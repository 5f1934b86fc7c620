"""Scripts that make and score the demo model; `sgl_pipeline` never imports them."""
