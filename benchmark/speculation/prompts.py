"""Prompts of the kinds that drafts are measured with, from this repository's own texts.

Code edits repeat a file, retrieval answers quote a page, records repeat their keys, chats repeat
little, and the answers of one kind are held to a JSON schema. Functions of the files.
"""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

from benchmark.support.paths import DOCS, ROOT

PROMPTS_EACH = 8  # of each kind
_PACKAGE = ROOT / "sgl_pipeline"
_RENAMED = (
    ("scheduling/decode_reserve.py", "pipeline_depth", "num_stages"),
    ("throttle/token_throttle.py", "load", "state"),
    ("scheduling/page_pool.py", "num_pages", "pool_size"),
    ("scheduling/page_run.py", "pages", "page_ids"),
    ("scheduling/pausing.py", "is_paused", "is_stopped"),
    ("scheduling/stop_rules.py", "finish_reason", "reason_to_stop"),
    ("throttle/adaptive_throttle.py", "load", "state"),
    ("throttle/decode_balance.py", "load", "state"),
)
_PAGES = ("design/loss.md", "design/moves.md", "design/stages.md", "faults.md")
_QUESTIONS = (
    "Quote the sentences that give a reason, word by word.",
    "Summarize the text in its own words, one paragraph.",
)
_EXCERPT_CHARACTERS = 2_400
_TOPICS = ("people", "cities", "books", "planets")
_SHAPES = (
    "with the keys id, name, description and active",
    'like {"id": 1, "name": "...", "tags": ["...", "..."], "size": {"width": 1, "height": 2}}',
)
_ORDERS = (
    "Ann Smith from Lyon bought three books.",
    "Paolo Conti in Rome ordered a bicycle, and it is urgent.",
    "Hans Maier, Berlin, has paid and wants his money back.",
    "Two lamps go to a hotel in Paris.",
    "A school in Munich waits for forty chairs.",
    "Eva has not paid for her shoes yet.",
    "The tenth order of a customer in Naples is a clock.",
    "A baker in Nice needs flour until tomorrow.",
)
_ORDER_SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string"},
        "shipping_address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Germany", "France", "Italy"]},
            },
            "required": ["street", "city", "postal_code", "country"],
            "additionalProperties": False,
        },
        "payment_status": {"enum": ["pending", "completed", "refunded"]},
        "is_priority": {"type": "boolean"},
    },
    "required": ["customer_name", "shipping_address", "payment_status", "is_priority"],
    "additionalProperties": False,
}
_CHATS = (
    "How do I cook rice so that it does not stick?",
    "Explain why the sky is blue to a child.",
    "Write a short letter to a friend who has moved to another city.",
    "What should I think about before I buy a used bicycle?",
    "Tell me a story about a lighthouse keeper.",
    "What is the difference between a virus and a bacterium?",
    "Give me advice for my first job interview.",
    "Describe a walk through a forest in autumn.",
)


def code_edits() -> list[str]:
    """Small files of the package, each with one name to change."""
    return [
        f"Rename `{old}` to `{new}` in this file. Reply with the whole file and nothing else.\n\n"
        f"```python\n{(_PACKAGE / path).read_text(encoding='utf-8')}```"
        for path, old, new in _RENAMED
    ]


def retrieval_answers() -> list[str]:
    """Excerpts of pages, with a question about them."""
    return [
        f"{_excerpt(DOCS / page)}\n\n{question}" for page, question in product(_PAGES, _QUESTIONS)
    ]


def records() -> list[str]:
    """Lists of things as JSON."""
    return [
        f"Write a JSON array of ten {topic}, {shape}. Reply with JSON only."
        for topic, shape in product(_TOPICS, _SHAPES)
    ]


def orders() -> list[str]:
    """Sentences to be written as JSON by a schema, with keys of several tokens."""
    return [f"Write this order as JSON: {text}" for text in _ORDERS]


def chats() -> list[str]:
    """Questions without a text."""
    return list(_CHATS)


KINDS: dict[str, Callable[[], list[str]]] = {
    "code edit": code_edits,
    "retrieval": retrieval_answers,
    "JSON": records,
    "JSON by schema": orders,
    "JSON, same prompts": orders,
    "chat": chats,
}
# The schemas of the kinds whose answers are held to one; the kind behind it shows what that costs.
SCHEMAS = {"JSON by schema": json.dumps(_ORDER_SCHEMA)}


def chat_ids(directory: Path) -> dict[str, list[list[int]]]:
    """The prompts of each kind as chats of one turn, by the tokenizer in `directory`."""
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def ids(prompt: str) -> list[int]:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return {kind: [ids(prompt) for prompt in prompts()] for kind, prompts in KINDS.items()}


def _excerpt(page: Path) -> str:
    """The page's first paragraphs after its head, without links."""
    text = page.read_text(encoding="utf-8").partition("\n\n")[2]
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return text[:_EXCERPT_CHARACTERS].rpartition("\n")[0]
