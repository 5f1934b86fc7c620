"""Structured output: grammars, compiled in a process of their own and matched in the scheduler."""
