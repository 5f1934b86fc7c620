"""Costs of one model's parts on one machine, as functions of a step's work.

A file of them is JSON and names the model, dtype and device that they hold for. The formulas are
DynaPipe's (`T_layer = sum(phi1 n + phi2 n L + eps)`, `T_sample = alpha N + beta`), with curves
where it has straight lines: on a CPU few rows cost as much as reading the weights.
"""

import msgspec

from sgl_pipeline.decoding import decode
from sgl_pipeline.errors import ConfigurationError, MalformedData


class RowCost(msgspec.Struct, frozen=True):
    """Milliseconds by rows: `times_ms[i]` at `rows[i]` (ascending), straight in between, the first
    one below, `row_ms` for each row beyond the last."""

    rows: tuple[float, ...]
    times_ms: tuple[float, ...]
    row_ms: float


class LayerCost(msgspec.Struct, frozen=True):
    """One layer: the cost of its rows, of each decode, and of each token that is attended to."""

    rows: RowCost
    decode_ms: float
    decode_attended_ms: float
    prefill_attended_ms: float


class StepCosts(msgspec.Struct, frozen=True):
    """A model's parts. A layer costs `layer` times its entry in `layer_weights`, which has one for
    each layer of the model; `layer_windows[l]` is the number of tokens that a row of layer `l`
    attends to at most, 0 where it keeps a state, None for all of them (empty: None everywhere). The
    embedding goes by a step's tokens, the tail (final norm, head and sampling) by its samples;
    without samples it takes no time."""

    layer: LayerCost
    embedding: RowCost
    tail: RowCost
    layer_weights: tuple[float, ...]
    layer_windows: tuple[int | None, ...] = ()


class FitErrors(msgspec.Struct, frozen=True):
    """Mean absolute errors on shapes that were not fitted, as shares of the measured times."""

    layer: float
    tail: float
    num_shapes: int


class CostFile(msgspec.Struct, frozen=True, kw_only=True):
    """`StepCosts` and what they hold for. `model` is the name of its directory, `threads` the
    compute threads of a stage; `machine` and `date` are for the reader."""

    model: str
    dtype: str
    device: str
    threads: int
    machine: str
    date: str
    costs: StepCosts
    errors: FitErrors | None = None

    @property
    def file_name(self) -> str:
        """The name of its file, relative to the directory of such files."""
        return cost_file_name(self.model, self.dtype, self.device, self.threads)


def cost_file_name(model: str, dtype: str, device: str, threads: int) -> str:
    """The name of the file with the costs of these; `device` may be a card's name with blanks."""
    return f"{model}-{dtype}-{device.replace(' ', '-')}-{threads}-threads.json"


def encode_costs(costs: CostFile) -> bytes:
    """Readable JSON."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n"


def decode_costs(
    content: bytes,
    name: str,
    *,
    model: str,
    num_layers: int,
    dtype: str,
    device: str,
    threads: int,
) -> CostFile:
    """The costs in the file `name`, if they belong to this model, dtype and device.

    Raises ConfigurationError, which names the difference or the unreadable field.
    """
    advice = f"run `python -m sgl_pipeline fit` for {model}, or name another file"
    try:
        found = decode(msgspec.json.Decoder(CostFile), content)
    except MalformedData as error:
        raise ConfigurationError(
            f"{name} is not a file of step costs ({error}); {advice}"
        ) from None
    wanted = {"model": model, "dtype": dtype, "device": device, "threads": threads}
    for field, value in wanted.items():
        if getattr(found, field) != value:
            raise ConfigurationError(
                f"{name} has the costs of {field} {getattr(found, field)}, this server runs "
                f"{value}; {advice}"
            )
    if len(found.costs.layer_weights) != num_layers:
        raise ConfigurationError(
            f"{name} has the costs of {len(found.costs.layer_weights)} layers, {model} has "
            f"{num_layers}; {advice}"
        )
    _check(found.costs, name)
    return found


def _check(costs: StepCosts, name: str) -> None:
    """Raises ConfigurationError where a number cannot be a time, or a window."""
    layer = costs.layer
    for rows in (layer.rows, costs.embedding, costs.tail):
        is_ascending = all(a < b for a, b in zip(rows.rows, rows.rows[1:], strict=False))
        if not rows.rows or len(rows.rows) != len(rows.times_ms) or not is_ascending:
            raise ConfigurationError(f"{name}: rows must ascend, with a time for each")
        if min(*rows.times_ms, rows.row_ms) < 0.0:
            raise ConfigurationError(f"{name} has a time below zero")
    slopes = (layer.decode_ms, layer.decode_attended_ms, layer.prefill_attended_ms)
    if min(*slopes, *costs.layer_weights) < 0.0:
        raise ConfigurationError(f"{name} has a time below zero")
    windows = costs.layer_windows
    if len(windows) not in (0, len(costs.layer_weights)):
        raise ConfigurationError(
            f"{name} has the windows of {len(windows)} of {len(costs.layer_weights)} layers"
        )
    if any(window is not None and window < 0 for window in windows):
        raise ConfigurationError(f"{name} has a window below zero")
