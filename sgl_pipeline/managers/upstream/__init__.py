"""Our tables and checks of SGLang's flags, fields, messages and environment."""
