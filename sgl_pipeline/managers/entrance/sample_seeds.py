"""A seed and a room of its own for each of the `n` samples of a prompt, where the user gave one
seed, or a router one room.

It must run before upstream fans the request out, which would give the same to every sample: here a
token is a function of its seed and place, so all samples would be the same, and a room is one
request's. Upstream would also send the prompt ahead of its samples, with their room.
"""

from typing import Any

_NUM_SEEDS = 2**64
_LOWEST_SEED = -(2**63)
_NUM_ROOMS = 2**63
# Fields of GenerateReqInput that may hold a list with one entry for each prompt.
_PER_PROMPT = (
    *("extra_key", "cache_salt", "lora_path"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
)


def spread_samples(obj: Any) -> None:
    """Turns `n` samples of each prompt that have a seed or a room into `n` prompts of one sample,
    in upstream's order.

    Sample 0 keeps the seed, sample `j` gets the `j`-th after it, and so for rooms: `i` over all
    samples of a single room, `j` for sample `j` of a prompt that has a room of its own. A room for
    each sample stays.

    Args:
        obj: a GenerateReqInput that `check_sequences` and `check_rooms` have passed, changed in
            place.
    """
    options = getattr(obj, "sampling_params", None) or {}
    several: list[dict[str, Any]] = options if isinstance(options, list) else [options]
    samples = {one.get("n") or 1 for one in several}
    has_rooms = getattr(obj, "bootstrap_room", None) is not None
    # Different numbers of samples are for upstream to refuse.
    if len(samples) != 1 or (not has_rooms and all(_seed(one) is None for one in several)):
        return
    (num_samples,) = samples
    if num_samples == 1:
        _unwrap_rooms(obj)
        return
    num_prompts = _repeat_prompts(obj, num_samples)
    if not num_prompts:
        return
    per_prompt = several if isinstance(options, list) else several * num_prompts
    obj.sampling_params = [
        one | {"n": 1, "sampling_seed": _after(_seed(one), sample)}
        for one in per_prompt
        for sample in range(num_samples)
    ]
    for name in _PER_PROMPT:
        if _is_per_prompt(name, values := getattr(obj, name)):
            setattr(obj, name, _repeat(values, num_samples))
    if has_rooms:
        _spread_rooms(obj, num_prompts, num_samples)
    if isinstance(obj.rid, list):
        obj.rid = [f"{rid}_{sample}" for rid in obj.rid for sample in range(num_samples)]


def _repeat_prompts(obj: Any, num_samples: int) -> int:
    """Makes each prompt `num_samples`; returns the number that there were, 0 where there are
    none."""
    field = "text" if obj.text is not None else "input_ids"
    prompts = getattr(obj, field)
    if not prompts:
        return 0
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    setattr(obj, field, _repeat(prompts, num_samples))
    return len(prompts)


def _spread_rooms(obj: Any, num_prompts: int, num_samples: int) -> None:
    for name in ("bootstrap_host", "bootstrap_port"):
        values = getattr(obj, name)
        if isinstance(values, list) and len(values) == num_prompts:
            setattr(obj, name, _repeat(values, num_samples))
    rooms = obj.bootstrap_room
    if isinstance(rooms, int):
        obj.bootstrap_room = [
            (rooms + place) % _NUM_ROOMS for place in range(num_prompts * num_samples)
        ]
    elif len(rooms) == num_prompts:
        obj.bootstrap_room = [
            None if room is None else (room + sample) % _NUM_ROOMS
            for room in rooms
            for sample in range(num_samples)
        ]


def _unwrap_rooms(obj: Any) -> None:
    """Upstream takes no list for a single prompt of one sample."""
    prompts = obj.text if obj.text is not None else obj.input_ids
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            values = getattr(obj, name, None)
            if isinstance(values, list) and values:
                setattr(obj, name, values[0])


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
