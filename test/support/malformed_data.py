"""Bytes that msgspec refuses, each with another exception (`sgl_pipeline/decoding.py`)."""

MSGPACK = {
    "cut short": b"\x83\xa4type",
    "too deep": b"\x82\xa1z" + b"\x91" * 100_000,
}
JSON = {
    "cut short": b'{"type": ',
    "not UTF-8": b'{"\xff": 1}',
    "too deep": b'{"z": ' + b"[" * 100_000,
}
