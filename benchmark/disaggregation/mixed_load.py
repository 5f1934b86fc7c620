"""The loads that prefill and decode apart are measured with: several kinds of requests at once.

Pure functions of their arguments; `mixed_clients.py` sends what is planned here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from benchmark.models.make_model import FIRST_FILLER


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one kind, all greedy and as long. Either `clients` ask again when they have their
    answer, or (0) requests arrive evenly, so that prefill alone takes `prefill_share` of a core's
    time."""

    name: str
    input_tokens: int
    output_tokens: int
    clients: int = 0
    prefill_share: float = 0.0

    def output_tokens_of(self, client: int, number: int) -> int:
        """The length of a client's answer, from number 0 on. First answers have all lengths up to a
        whole one, so that the clients do not go on in step."""
        if self.clients and number == 0:
            return max(2, -(-self.output_tokens * (client + 1) // self.clients))
        return self.output_tokens


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """Kinds of requests that come at the same time."""

    name: str
    kinds: tuple[Kind, ...]


LOADS = (
    MixedLoad(
        "long prompts beside streams",
        (
            Kind(name="streams", input_tokens=32, output_tokens=256, clients=8),
            Kind(name="long prompts", input_tokens=1024, output_tokens=8, prefill_share=0.5),
        ),
    ),
    MixedLoad(
        "few users, short prompts",
        (Kind(name="requests", input_tokens=64, output_tokens=64, clients=2),),
    ),
    MixedLoad(
        "many short prompts, short answers",
        (Kind(name="requests", input_tokens=64, output_tokens=8, clients=16),),
    ),
    MixedLoad(
        "streams alone",
        (Kind(name="streams", input_tokens=32, output_tokens=256, clients=16),),
    ),
)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A request's place in the plan; `client` is 0 of a kind that has none."""

    load: str
    round: int
    kind: str
    client: int
    number: int

    def prompt(self, num_tokens: int, vocab_size: int) -> list[int]:
        """Tokens that no other request's prompt begins with: no cache has them."""
        rng = Random(f"{self.load}/{self.round}/{self.kind}/{self.client}/{self.number}")
        return [rng.randrange(FIRST_FILLER, vocab_size) for _ in range(num_tokens)]


def arrivals_s(kind: Kind, seconds: float, prefill_s: Mapping[str, float]) -> list[float]:
    """The moments at which requests of a kind without clients come, the first after half a period.

    Args:
        prefill_s: what a prompt of each kind takes one core.
    """
    period_s = prefill_s[kind.name] / kind.prefill_share
    return [period_s * (number + 0.5) for number in range(round(seconds / period_s))]
