"""Names of objects in a store, by what they hold: SGLang's unified key scheme.

Source: SGLang 0.5.23, `mem_cache/hicache_key_scheme.py`. An object is one page of one layer or of
several that follow each other, with keys and values of all heads; a record says which
(`page_record.py`), so pipelines of any depth and split share them. The digest stands for all that
two servers must have in common to use each other's bytes.
"""

import hashlib
import re
from collections.abc import Mapping

import msgspec

SCHEMA_VERSION = 1
# [layers, 2, page, heads, head_dim], keys first, of elements that are plain 16 or 32 bit numbers.
PLAIN_LAYOUT = "page-unified-v1"
# The page's memory as it lies in our pool, all keys before all values: of quantized elements with
# their scales, and where keys and values have unequal widths.
MEMORY_LAYOUT = "sgl-pipeline-page-memory-v1"

_HEX_HASH = "[0-9a-f]{64}"
_DIGEST = rf"ukv{SCHEMA_VERSION}-[0-9a-f]{{16}}"
DIGEST_NAME = re.compile(_DIGEST)
RECORD_NAME = re.compile(_HEX_HASH)
# Groups: page hash, digest, first layer, the one after the last.
OBJECT_NAME = re.compile(rf"({_HEX_HASH})_({_DIGEST})_L(\d+)-(\d+)_H0")


def model_id(served_name: str, model_digest: str, computation: Mapping[str, str]) -> str:
    """Identifies what computes keys and values from tokens.

    Args:
        model_digest: of config and weights, sampled bytes included (`cluster/model_digest.py`).
        computation: what flags decide besides: dtype, quantization, device, changes of the config.

    The tokenizer is left out: pages are named by token ids, whatever text they stand for.
    """
    settings = (f"{name}={computation[name]}" for name in sorted(computation))
    return "/".join((served_name, model_digest, *settings))


def namespace_digest(
    *, model_id: str, dtype: str, page_size: int, num_kv_heads: int, layout: str = PLAIN_LAYOUT
) -> str:
    """The digest in all names of one key space.

    Args:
        dtype: the logical one of keys and values, such as `bfloat16` or `fp8_e4m3`.
        page_size: tokens of a page.
        num_kv_heads: of the model, all in one object.
        layout: order and meaning of an object's bytes.
    """
    assert model_id and page_size > 0 and num_kv_heads > 0
    # Names and sequence of the fields are part of the scheme.
    identity = {
        "schema_version": SCHEMA_VERSION,
        "model_id": model_id,
        "dtype": dtype,
        "page_size": page_size,
        "rank_replicated": False,
        "total_kv_heads": num_kv_heads,
        "layer_partition": 1,
        "head_group": num_kv_heads,
        "object_layout": layout,
    }
    encoded = msgspec.msgpack.encode(identity)
    return f"ukv{SCHEMA_VERSION}-{hashlib.sha256(encoded).hexdigest()[:16]}"


def object_name(page_hash: bytes, digest: str, layers: range) -> str:
    """The name of a page's object of `layers`, whose numbers are those in the whole model."""
    return f"{page_hash.hex()}_{digest}_L{layers.start}-{layers.stop}_H0"
