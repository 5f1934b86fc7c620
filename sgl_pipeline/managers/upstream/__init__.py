"""What is known of SGLang's flags, fields, messages and environment."""
