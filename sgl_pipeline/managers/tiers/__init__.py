"""Storage backends of SGLang for the pages of a host."""
