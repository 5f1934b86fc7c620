"""The slim vLLM: what is kept of its libraries and of its wheel."""

import importlib.util
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmark.gpu import pack_vllm
from benchmark.gpu.fat_binaries import Entry, empty, entries
from benchmark.gpu.pack_vllm import ATTENTION, OPERATORS, is_attention_kept, is_operator_kept
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.pp_runner.cpu_kernels.build import find_compiler

PTX, CODE = 1, 2
WANTED = b"_ZN_flash_fwd_hdim128_bf16_paged_sm90_cu_"
SPLIT = b"_ZN_flash_fwd_hdim128_bf16_split_sm90_cu_"
OTHER_HEADS = b"_ZN_flash_fwd_hdim64_bf16_paged_sm90_cu_"
OTHER_DTYPE = b"_ZN_flash_fwd_hdim128_fp16_paged_sm90_cu_"


def container(*kernels: tuple[int, int, bytes]) -> bytes:
    """The kernels of a source file: the kind, the capability and the contents of each."""
    body = b""
    for kind, capability, content in kernels:
        content += bytes(-len(content) % 8)
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(content))
        body += header.ljust(28, b"\1") + struct.pack("<I", capability).ljust(36, b"\1") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library_of(folder: Path, *containers: bytes) -> bytes:
    """A library that the machine's compiler makes, with these containers, eight bytes apart."""
    data = bytes(8).join(containers)
    source, path = folder / "kernels.c", folder / "kernels.so"
    text = ",".join(map(str, data))
    section = '__attribute__((section(".nv_fatbin"), aligned(8)))'
    source.write_text(f"const unsigned char kernels[] {section} = {{{text}}};\n")
    flags = ["-x", "c", "-shared", "-fPIC"]
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(path)], check=True)
    return path.read_bytes()


FILES = (
    container((CODE, 80, b"for an A100"), (PTX, 90, b"PTX"), (CODE, 90, b"for an H100")),
    container((CODE, 120, b"for a 5090"), (PTX, 80, b"more PTX")),
    container((CODE, 90, WANTED)),
)


def test_every_entry_is_found(tmp_path: Path) -> None:
    library = library_of(tmp_path, *FILES)
    found = [
        (each.capability, each.has_code, library[each.start : each.end].rstrip(b"\0"))
        for each in entries(library)
    ]
    assert found == [
        (80, True, b"for an A100"),
        (90, False, b"PTX"),
        (90, True, b"for an H100"),
        (120, True, b"for a 5090"),
        (80, False, b"more PTX"),
        (90, True, WANTED),
    ]


def test_only_a_hoppers_operators_keep_their_contents(tmp_path: Path) -> None:
    whole = library_of(tmp_path, *FILES)
    library = bytearray(whole)
    kept = empty(library, is_operator_kept)
    assert len(library) == len(whole) and kept == 16 + 48
    for content in (b"for an H100", WANTED):
        assert content in library
    for content in (b"for an A100", b"PTX\0", b"for a 5090", b"more PTX"):
        assert content in whole and content not in library
    # The driver finds entries where they were, and takes none that is empty.
    before, after = list(entries(whole)), list(entries(library))
    assert [(one.start, one.end) for one in after] == [(one.start, one.end) for one in before]
    assert [each.capability for each in after] == [120, 120, 90, 120, 120, 90]


@pytest.mark.parametrize(
    ("content", "is_kept"),
    [(WANTED, True), (SPLIT, True), (b"combine", True), (OTHER_HEADS, False), (OTHER_DTYPE, False)],
)
def test_attention_is_kept_by_its_source_file(content: bytes, is_kept: bool) -> None:
    assert is_attention_kept(Entry(0, 0, len(content), 90, True), content) == is_kept


@pytest.mark.parametrize(
    ("damage", "message"),
    [(b"\x7fELF\x01", "64-bit"), (b"", "no container"), (b"not ELF", "64-bit")],
)
def test_another_layout_is_refused(tmp_path: Path, damage: bytes, message: str) -> None:
    library = bytearray(library_of(tmp_path, FILES[0], b"\1" * 8))
    library[: len(damage)] = damage
    with pytest.raises(ConfigurationError, match=message):
        list(entries(library))


def loaded(path: Path) -> Any:
    """The module of a file, whatever module of its name has been imported here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_site_has_the_kept_files_and_the_stand_ins(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    kept = ("vllm/__init__.py", "vllm/vllm_flash_attn/__init__.py", "vllm-0.dist-info/METADATA")
    dropped = (
        "vllm/vllm-rs/x",
        "vllm/_moe_C_stable_libtorch.abi3.so",
        "vllm/third_party/deep_gemm/__init__.py",
        "vllm/model_executor/layers/fused_moe/configs/E=8.json",
    )
    with zipfile.ZipFile(wheel, "w") as content:
        for name in (*kept, *dropped):
            content.writestr(name, name)
        for name in (OPERATORS, ATTENTION):
            content.writestr(name, library_of(tmp_path, *FILES))
    site = tmp_path / "site"
    pack_vllm.unpack(wheel, site)
    stand_ins = {f"{name}.py" for name in pack_vllm.STAND_INS}
    found = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert found == {*kept, *stand_ins, OPERATORS, ATTENTION}
    assert b"for an A100" not in (site / OPERATORS).read_bytes()
    assert loaded(site / "xgrammar/structural_tag.py").AnyName
    pack_vllm.pack(site, tmp_path / "pack.tar.xz")
    assert [path.name for path in tmp_path.glob("*.xz*")] == ["pack.tar.xz"]


def test_a_wheel_without_a_library_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr(OPERATORS, "")
    with pytest.raises(ConfigurationError, match="vllm_fa3_C"):
        pack_vllm.unpack(wheel, tmp_path / "site")
