"""A seed of its own for each of the `n` samples of a prompt, where the user gave one seed.

It must run before upstream fans the request out, which would give the same seed to every sample:
here a token is a function of its seed and place, so all samples would be the same.
"""

from typing import Any

_NUM_SEEDS = 2**64
_LOWEST_SEED = -(2**63)
# Fields of GenerateReqInput that may hold a list with one entry for each prompt.
_PER_PROMPT = (
    *("extra_key", "cache_salt", "lora_path"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
)


def spread_seeds(obj: Any) -> None:
    """Turns `n` seeded samples of each prompt into `n` prompts of one sample, in upstream's order.

    Sample 0 keeps the seed, sample `j` gets the `j`-th after it.

    Args:
        obj: a GenerateReqInput that `front_guard.check_sequences` has passed, changed in place.
    """
    options = getattr(obj, "sampling_params", None) or {}
    several: list[dict[str, Any]] = options if isinstance(options, list) else [options]
    samples = {one.get("n") or 1 for one in several}
    # Different numbers of samples are for upstream to refuse.
    if len(samples) != 1 or samples == {1} or all(_seed(one) is None for one in several):
        return
    (num_samples,) = samples
    prompts = "text" if obj.text is not None else "input_ids"
    values = getattr(obj, prompts)
    if not values:
        return
    if isinstance(values, str) or isinstance(values[0], int):
        values = [values]
    per_prompt = several if isinstance(options, list) else several * len(values)
    setattr(obj, prompts, _repeat(values, num_samples))
    obj.sampling_params = [
        one | {"n": 1, "sampling_seed": _after(_seed(one), sample)}
        for one in per_prompt
        for sample in range(num_samples)
    ]
    for name in _PER_PROMPT:
        if _is_per_prompt(name, values := getattr(obj, name)):
            setattr(obj, name, _repeat(values, num_samples))
    if isinstance(obj.rid, list):
        obj.rid = [f"{rid}_{sample}" for rid in obj.rid for sample in range(num_samples)]


def _is_per_prompt(name: str, values: Any) -> bool:
    if name == "token_ids_logprob":  # flat, it holds the ids that are the same for all prompts
        return isinstance(values, list) and bool(values) and isinstance(values[0], list)
    return isinstance(values, list)


def _seed(options: dict[str, Any]) -> Any:
    return options.get("sampling_seed")


def _after(seed: Any, distance: int) -> Any:
    """The seed `distance` after `seed`, in the range that upstream accepts; no integer stays."""
    if not isinstance(seed, int):
        return seed
    return (seed + distance - _LOWEST_SEED) % _NUM_SEEDS + _LOWEST_SEED


def _repeat(values: list[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]
