"""`min_p` on a live server: every token is the one that the server's own distributions give.

The reference takes all log-probabilities of a position, which are those before any cut, keeps what
is at least `min_p` times the likeliest, and draws by the number that seed and position give.
"""

from typing import Any

import numpy as np
import pytest
from support.live_server import LiveServer

from sgl_pipeline.pp_runner.output.sampler import uniform_numbers

pytestmark = pytest.mark.multiproc
PROMPT_IDS = [79, 110, 99, 101, 32, 117]  # an answer that nothing decides, unlike a question's
VOCAB_SIZE = 320  # of the demo model
NUM_TOKENS = 40
TEMPERATURE = 1.7


def sampling(min_p: float, seed: int, temperature: float = TEMPERATURE) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "min_p": min_p,
        "sampling_seed": seed,
        "max_new_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }


def ids_of(server: LiveServer, *options: dict[str, Any]) -> list[list[int]]:
    """The tokens of one prompt under each of the options, asked for at once."""
    reply = server.generate(input_ids=[PROMPT_IDS] * len(options), sampling_params=list(options))
    assert reply.status_code == 200, reply.text
    return [one["output_ids"] for one in reply.json()]


def distributions(server: LiveServer, options: dict[str, Any]) -> tuple[list[int], np.ndarray]:
    """The tokens, and for each of them the probabilities of the whole vocabulary, [N, V]."""
    reply = server.generate(
        input_ids=PROMPT_IDS,
        sampling_params=options,
        return_logprob=True,
        token_ids_logprob=list(range(VOCAB_SIZE)),
    )
    assert reply.status_code == 200, reply.text
    rows = reply.json()["meta_info"]["output_token_ids_logprobs"]
    logprobs = np.array([[entry[0] for entry in row] for row in rows], np.float64)
    assert logprobs.shape == (NUM_TOKENS, VOCAB_SIZE)
    return reply.json()["output_ids"], np.exp(logprobs)


def drawn(probabilities: np.ndarray, min_p: float, seed: int) -> list[int]:
    """The token of each row [V]; the row's number after the prompt is its position."""
    positions = np.arange(len(PROMPT_IDS), len(PROMPT_IDS) + len(probabilities))
    uniforms = uniform_numbers([seed] * len(positions), positions)
    tokens = []
    for row, uniform in zip(probabilities, uniforms, strict=True):
        mass = np.where(row >= min_p * row.max(), row, 0.0).cumsum()
        tokens.append(int(np.searchsorted(mass, uniform * mass[-1], side="right")))
    return tokens


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_a_token_is_drawn_from_what_is_likely_enough(
    demo_server: LiveServer, min_p: float, seed: int
) -> None:
    ids, probabilities = distributions(demo_server, sampling(min_p, seed))
    assert ids == drawn(probabilities, min_p, seed)
    assert ids != drawn(probabilities, 0.0, seed), "min_p had nothing to cut"
    shares = probabilities[np.arange(NUM_TOKENS), ids] / probabilities.max(axis=1)
    assert shares.min() >= min_p * (1.0 - 1e-5)
    assert shares.min() < 1.0, "all tokens were the likeliest"


def test_all_of_the_likeliest_is_greedy_and_next_to_nothing_is_no_cut(
    demo_server: LiveServer,
) -> None:
    """Beside each other in the same steps, and beside a request with another cut."""
    whole, nothing, unset, other, greedy = ids_of(
        demo_server,
        sampling(1.0, seed=5),
        sampling(1e-9, seed=5),
        {name: value for name, value in sampling(0.0, seed=5).items() if name != "min_p"},
        sampling(0.3, seed=5),
        sampling(0.0, seed=5, temperature=0.0),
    )
    assert whole == greedy
    assert nothing == unset
    assert len({tuple(ids) for ids in (greedy, unset, other)}) == 3
    assert other == distributions(demo_server, sampling(0.3, seed=5))[0]


@pytest.mark.parametrize("min_p", [-0.1, 1.1])
def test_what_is_no_share_is_a_400(demo_server: LiveServer, min_p: float) -> None:
    reply = demo_server.generate(input_ids=PROMPT_IDS, sampling_params={"min_p": min_p})
    assert reply.status_code == 400 and "min_p" in reply.text
