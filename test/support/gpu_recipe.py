"""What README.md of the GPU benchmark says, for tests that hold code to it."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "benchmark" / "gpu" / "README.md").read_text()


def listed_packages() -> list[str]:
    """What it asks for where there is no network."""
    (sentence,) = re.findall(r"^- Without: Python with (.*?)\.\s", README, re.M | re.S)
    names = re.sub(r"\(.*?\)|what FlashInfer\s+imports:|\band\b", ",", sentence)
    return [name for part in names.split(",") if (name := part.strip())]
