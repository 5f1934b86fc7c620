"""Searches the rates at which the goodput passes what is needed.

Goodput falls with the rate only roughly: a round of a few hundred requests has its luck, and a
little more load may fall better into steps. So a bisection only chooses the rates to try, with the
same rounds at each of them, and `curve.capacity` then reads the answer from all trials together.
"""

from sgl_pipeline.capacity.rate_trial import OnTrial, RateTrial, Serve
from sgl_pipeline.errors import ConfigurationError
from sgl_pipeline.goodput import LatencyTarget

# Beyond this many steps of the bracket, something else than the rate decides.
_MOST_STEPS = 16
# Tried on both sides of the answer, where the bisection has not been: the fit needs neighbors.
_NEIGHBOR = 1.12


def search_rates(
    serve: Serve,
    target: LatencyTarget,
    needed_share: float,
    *,
    num_rounds: int,
    guess_per_s: float,
    factor: float,
    tolerance: float,
    on_trial: OnTrial = lambda trial: None,
) -> list[RateTrial]:
    """Trials by rising rate, of which the first has the needed goodput and the last has not.

    Args:
        guess_per_s: the first rate that is tried.
        factor: from one rate to the next while one side is unknown; small for a good guess.
        tolerance: the bisection ends when the bracket is this narrow, as a share of the rate.

    Raises ConfigurationError where the goodput does not pass what is needed at any rate.
    """
    trials: dict[float, RateTrial] = {}

    def carries(rate_per_s: float) -> bool:
        trial = RateTrial(rate_per_s, tuple(serve(rate_per_s, n) for n in range(num_rounds)))
        trials[rate_per_s] = trial
        on_trial(trial)
        return trial.goodput(target) >= needed_share

    low = high = guess_per_s
    rises = carries(guess_per_s)
    for _ in range(_MOST_STEPS):
        if rises:
            low, high = high, high * factor
            if not carries(high):
                break
        else:
            low, high = low / factor, low
            if carries(low):
                break
    else:
        raise ConfigurationError(_never_passes(rises, needed_share, low, high))
    while high / low > 1.0 + tolerance:
        middle = (low * high) ** 0.5
        if carries(middle):
            low = middle
        else:
            high = middle
    for neighbor, first, last in (
        (low / _NEIGHBOR, low / _NEIGHBOR**2, low),
        (high * _NEIGHBOR, high, high * _NEIGHBOR**2),
    ):
        if not any(first <= rate < last and rate not in (low, high) for rate in trials):
            carries(neighbor)
    return [trials[rate] for rate in sorted(trials)]


def _never_passes(rises: bool, needed_share: float, low: float, high: float) -> str:
    if rises:
        return (
            f"{needed_share:.0%} of the requests are still within the targets at {high:.3g} "
            "requests a second: the load is too short to fill the pipeline; use more --requests"
        )
    return (
        f"less than {needed_share:.0%} of the requests are within the targets even at {low:.3g} "
        "requests a second, where hardly two are served at a time"
    )
