"""Packs a slim vLLM for a Hopper machine without network, for `vllm_beside.py`.

    python -m benchmark.gpu.pack_vllm         # writes .gpu/vllm.tar.xz, 17 MiB

Downloads vLLM's wheel (240 MB) and the packages of vllm_requirements.txt. Of the wheel it keeps the
Python, the general operators and FA3, without kernels for other cards, and of FA3 only
those for head_dim 128 in bf16; experts, quantized weights, the server and grammars are left
out, and small modules stand for the packages that are imported for them. Ten minutes of one core.
A kernel that is left out is zeros in its library: see `fat_binaries.py`.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from benchmark.gpu import fat_binaries
from benchmark.gpu.kernel_wheels import ROOT, download_for_python, install_pins_for_python
from benchmark.gpu.pack_vllm_attention import VERSION, parse_arguments
from sgl_pipeline.errors import ConfigurationError

ARCHIVE = ROOT / ".gpu" / "vllm.tar.xz"
REQUIREMENTS = Path(__file__).with_name("vllm_requirements.txt")
OPERATORS = "vllm/_C_stable_libtorch.abi3.so"
ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
_CAPABILITY = 90
_DROPPED = re.compile(
    r"vllm/(vllm-rs|third_party/(deep_gemm|flashmla|fmha_sm100)/)|/static/|/configs/.*\.json$|\.pyi$"
)
_KERNEL_FILE = re.compile(rb"flash_fwd_hdim[0-9a-z_]*?_sm90")
_WANTED_FILE = b"flash_fwd_hdim128_bf16_"
# Imported whatever is asked of vLLM; used for grammars and for harmony's format alone.
STAND_INS = (
    "xgrammar/__init__",
    "xgrammar/structural_tag",
    "xgrammar/openai_tool_call_schema",
    "llguidance/__init__",
    "llguidance/hf",
    "llguidance/numpy",
    "llguidance/torch",
    "openai_harmony/__init__",
)
STAND_IN = '''"""A stand-in: vLLM imports it for requests that this pack does not serve."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''


def main() -> None:
    """Exits with 1 and one message when a package cannot be had, or the wheel lacks a library."""
    arguments = parse_arguments(__doc__, ARCHIVE)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.archive.parent) as directory:
            wheels, site = Path(directory, "wheels"), Path(directory, "site")
            print(f"downloading vllm {VERSION} (240 MB) and what it imports", flush=True)
            wheel = download_for_python(wheels, f"vllm=={VERSION}", arguments.python)
            install_pins_for_python(site, REQUIREMENTS, arguments.python)
            print("packing, for minutes", flush=True)
            unpack(wheel, site)
            pack(site, arguments.archive)
    except subprocess.CalledProcessError:
        sys.exit("pip or strip failed, and says why above")
    except ConfigurationError as error:
        sys.exit(str(error))
    print(f"{arguments.archive}: {arguments.archive.stat().st_size / 2**20:.1f} MiB")


def unpack(wheel: Path, site: Path) -> None:
    """Puts what is kept of the wheel, and the stand-ins, beside the packages of `site`.

    Raises ConfigurationError when the wheel lacks a library, or has its kernels in another layout.
    """
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        if missing := {OPERATORS, ATTENTION}.difference(names):
            raise ConfigurationError(f"{wheel.name} has no {', '.join(sorted(missing))}")
        for name in names:
            if not _DROPPED.search(name) and not name.endswith(".so"):
                content.extract(name, site)
        for name, is_kept in ((OPERATORS, is_operator_kept), (ATTENTION, is_attention_kept)):
            library = bytearray(content.read(name))
            fat_binaries.empty(library, is_kept)
            (site / name).write_bytes(library)
            _strip(site / name)
    for name in STAND_INS:
        path = site / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(STAND_IN, encoding="utf-8")


def is_operator_kept(entry: fat_binaries.Entry, content: bytes) -> bool:
    """True for machine code of a Hopper. What has PTX alone, for weights in 4 bits, goes."""
    return entry.has_code and entry.capability == _CAPABILITY


def is_attention_kept(entry: fat_binaries.Entry, content: bytes) -> bool:
    """True for the kernels that schedule and combine, and for head_dim 128 in bf16."""
    files = _KERNEL_FILE.findall(content)
    return not files or any(name.startswith(_WANTED_FILE) for name in files)


def pack(site: Path, archive: Path) -> None:
    """Writes the files of `site` to a .tar.xz, there whole or not at all."""
    partial = archive.with_name(f"{archive.name}.partial")
    with tarfile.open(partial, "w:xz", preset=9) as packed:
        for path in sorted(site.rglob("*")):
            if path.is_file() and path.suffix not in (".pyc", ".pyi"):
                packed.add(path, path.relative_to(site).as_posix())
    partial.replace(archive)


def _strip(library: Path) -> None:
    if shutil.which("strip") is None:
        raise ConfigurationError("strip is needed, of binutils")
    subprocess.run(["strip", str(library)], check=True)


if __name__ == "__main__":
    main()
