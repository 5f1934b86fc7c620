"""A cheap digest of a model directory: whether two hosts have the same model.

Weights are not read. The config and the header of every safetensors file, which names each tensor
with dtype, shape and place, tell models, revisions of another shape and broken copies apart; the
size of the file tells what was cut short. Tensors of the same shapes with other values are not.
"""

import hashlib
import struct
from pathlib import Path

_MOST_HEADER_BYTES = 100 * 1024 * 1024  # as the format's own limit


def model_digest(model_path: str) -> str:
    """16 hexadecimal digits for the model in a directory. Raises OSError where it has no config."""
    digest = hashlib.sha256()
    directory = Path(model_path)
    digest.update((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) == 8:
                (num_bytes,) = struct.unpack("<Q", start)
                digest.update(file.read(min(num_bytes, _MOST_HEADER_BYTES)))
    return digest.hexdigest()[:16]
