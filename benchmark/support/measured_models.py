"""The models that a benchmark's `--model` names, and the texts that clients send them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmark.models.fetch_model import MODELS, fetch_model
from benchmark.models.make_model import PRESETS
from benchmark.support.loads import Load, MixedLoad, Texts, WrittenLoad, filler_texts
from benchmark.support.measured_runs import make_model
from benchmark.support.paths import DOCS, ROOT, SCRATCH

NAMES = f"a preset of make_model, {', '.join(MODELS)}, or a path"


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model as engines and clients are given it.

    Args:
        path: for engines; copies in other formats lie beside it.
        directory: with config and tokenizer, for clients: the path, or what was made of a GGUF
            file.
        page_ids: the text of our pages in its tokens; None for random weights, whose texts are
            fillers.
    """

    path: Path
    directory: Path
    page_ids: tuple[int, ...] | None
    texts: Texts

    def written(self, load: Load | MixedLoad, name: str) -> WrittenLoad:
        """The file `name` of `load` in texts of the model. The client's own random ids do not
        survive decoding: servers would count other tokens than it."""
        return load.written(SCRATCH / f"{name}.jsonl", self.texts)


def measured_model(name: str) -> MeasuredModel:
    """The model `name`, one of NAMES, made or fetched unless it is there.

    Raises ConfigurationError where there is no such model, or it cannot be fetched.
    """
    if name in PRESETS:
        path = make_model(name)
        return MeasuredModel(path, path, None, filler_texts(PRESETS[name].vocab_size))
    # It imports SGLang, which random weights have no need of.
    from sgl_pipeline.managers.command_line.model_files import find_model, require_tokenizer

    # A published file's copies must not lie beside it: a directory of one file is served by name.
    path = fetch_model(name).parent if name in MODELS else Path(name).resolve()
    directory = find_model(str(path), None, None)
    require_tokenizer(directory)
    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    pages = sorted((*ROOT.glob("*.md"), *DOCS.rglob("*.md")))
    page_ids = tokenizer.encode(
        "\n\n".join(page.read_text(encoding="utf-8") for page in pages), add_special_tokens=False
    ).ids
    return MeasuredModel(path, Path(directory), tuple(page_ids), page_texts(tokenizer, page_ids))


def page_texts(tokenizer: Tokenizer, page_ids: Sequence[int]) -> Texts:
    """Runs of `page_ids`, which begin anew after their end. Most have the tokens that were asked
    for; a run that is cut inside a character has one or two more."""

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode([page_ids[one % len(page_ids)] for one in token_ids]))

    return text
