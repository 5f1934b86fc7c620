"""A file that is no whole GGUF file, by mistake or by intent, is refused with one line."""

import random
import struct
from pathlib import Path

import pytest
from support.gguf_files import write_gguf
from support.tiny_models import tiny_model

from sgl_pipeline.errors import CheckpointError, ConfigurationError
from sgl_pipeline.managers.gguf import gguf_directory as directories
from sgl_pipeline.managers.gguf.gguf_directory import gguf_directory
from sgl_pipeline.managers.gguf.gguf_file import read_gguf_file

STRING, ARRAY, INT8, UINT32 = 8, 9, 1, 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    return write_gguf(tiny_model("llama"), path, "Q8_0").read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*fields: bytes, tensors: int = 0, num_fields: int | None = None) -> bytes:
    count = len(fields) if num_fields is None else num_fields
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(fields)


MANY = 2**60
HOSTILE = {
    "empty": b"",
    "other": b"PK\3\4" + bytes(100),
    "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "fields": header(num_fields=MANY),
    "tensors": header(tensors=MANY),
    "string": header(text("a") + struct.pack("<IQ", STRING, MANY) + b"x"),
    "name": header(struct.pack("<Q", MANY) + b"x"),
    "kind": header(text("a") + struct.pack("<I", 77)),
    "numbers": header(text("a") + struct.pack("<IIQ", ARRAY, INT8, MANY)),
    "strings": header(text("a") + struct.pack("<IIQ", ARRAY, STRING, MANY)),
    "arrays": header(text("a") + struct.pack("<IIQ", ARRAY, ARRAY, MANY)),
    "nested": header(text("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000),
    "alignment": header(text("general.alignment") + struct.pack("<II", UINT32, 0)),
    "utf8": header(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", UINT32, 0)),
    "dimensions": header(text("t") + struct.pack("<I", 2**31), tensors=1),
    "elements": header(
        text("t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0) + bytes(64), tensors=1
    ),
    "offset": header(text("t") + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(64), tensors=1),
    "type": header(text("t") + struct.pack("<IQIQ", 1, 4, 999, 0) + bytes(64), tensors=1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError, match=r"hostile\.gguf is truncated, corrupt or no GGUF"):
        read_gguf_file(path)


def test_a_file_that_ends_early_is_refused_wherever_it_ends(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    places = random.Random(0)
    for end in [*range(0, 2000, 61), *(places.randrange(len(whole)) for _ in range(20)), -1]:
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"cut\.gguf is truncated"):
            read_gguf_file(path)


def test_a_file_of_which_any_byte_is_wrong_ends_with_a_message_or_not_at_all(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "wrong.gguf"
    places, refused = random.Random(1), 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(places.randrange(1, 4)):
            content[places.randrange(8000)] = places.randrange(256)
        path.write_bytes(content)
        try:
            gguf_directory(path)
        except ConfigurationError as error:
            assert "wrong.gguf" in str(error) or "config.json" in str(error)
            refused += 1
    assert refused > 50


def test_no_place_for_the_directory_is_a_message(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigurationError, match="point XDG_CACHE_HOME elsewhere"):
        gguf_directory(path)


def test_a_directory_that_another_process_made_meanwhile_is_taken(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = directories.write_gguf_index

    def write_beside_another(directory: Path, index: object) -> None:
        monkeypatch.setattr(directories, "write_gguf_index", original)
        gguf_directory(path)
        original(directory, index)  # type: ignore[arg-type]

    monkeypatch.setattr(directories, "write_gguf_index", write_beside_another)
    found = gguf_directory(path)
    assert sorted(one.name for one in found.parent.iterdir()) == [found.name]
    assert (found / "config.json").is_file()
