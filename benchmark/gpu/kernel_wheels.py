"""Installs wheels into a folder of their own: what compiles kernels, and what a pack of them needs.

Called by `kernel_modules.prepare`, `kernel_pack.py` and the packs of vLLM. Must leave the
environment that runs it as it is.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "check-cuda.txt"
CUDA_REQUIREMENTS = ROOT / "requirements" / "cuda.txt"
# pip takes a wheel whose tag is named here; one built against an older glibc runs on a newer one.
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17)),
    "manylinux2014_x86_64",
    "linux_x86_64",
)


def pins(requirements: Path) -> dict[str, str]:
    """Maps the names of a requirements file, lower case with hyphens, to their versions."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line and line[0] != "#")
    return {name.lower().replace("_", "-"): version for name, _, version in pairs}


def install_compiler(folder: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Installs the wheels of `requirements` in `folder`, once; returns where they are.

    The place is named after the pins, so that with other pins every path that a compilation was
    given is another one, and ninja compiles again. Raises CalledProcessError when pip fails.
    """
    fingerprint = hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    wheels = folder / f"wheels-{fingerprint}"
    if not wheels.is_dir():
        print(f"installing {requirements.name} (600 MB to download)", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            partial = Path(directory) / "wheels"
            _pip_install(partial, ["-r", str(requirements)])
            partial.rename(wheels)  # there whole or not at all
    return wheels


def install_for_python(folder: Path, names: Sequence[str], python_version: str) -> None:
    """Installs the packages, at the versions of the CUDA set, for another Python on x86-64.

    Args:
        python_version: such as 3.12.

    Raises CalledProcessError when pip fails or has no wheel for it.
    """
    versions = pins(CUDA_REQUIREMENTS)
    requested = [f"{name}=={versions[name]}" for name in names]
    _pip_install(folder, [*_for_python(python_version), *requested])


def install_pins_for_python(folder: Path, requirements: Path, python_version: str) -> None:
    """Installs all of a requirements file as `install_for_python` does."""
    _pip_install(folder, [*_for_python(python_version), "-r", str(requirements)])


def download_for_python(folder: Path, requirement: str, python_version: str) -> Path:
    """Downloads one wheel for another Python on x86-64 into the empty `folder`; returns its path.

    Raises CalledProcessError when pip fails or has no wheel for it.
    """
    _pip("download", [f"--dest={folder}", *_for_python(python_version), requirement])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _for_python(version: str) -> list[str]:
    return [f"--python-version={version}", *(f"--platform={each}" for each in _PLATFORMS)]


def _pip_install(folder: Path, arguments: Sequence[str]) -> None:
    _pip("install", [f"--target={folder}", *arguments])


def _pip(command: str, arguments: Sequence[str]) -> None:
    options = ["-qq", "--no-input", "--no-deps", "--disable-pip-version-check"]
    options.append("--only-binary=:all:")
    subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], check=True)
