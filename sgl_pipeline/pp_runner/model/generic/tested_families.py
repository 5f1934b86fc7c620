"""The families whose tokens the tests compare with those of transformers' `generate`."""

# By `model_type` of the text model's config. test/pp_runner/model/generic/ holds the comparison.
TESTED_MODEL_TYPES: frozenset[str] = frozenset()
