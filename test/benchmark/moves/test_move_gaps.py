"""A move's row says how many layers with states it moved."""

from dataclasses import replace

from benchmark.models.make_model import PRESETS
from benchmark.models.preset import HybridPreset
from benchmark.moves.move_gaps import MoveCost, count_states, move_table

COST = MoveCost(
    model="0.45b-hybrid",
    weights="resident",
    round_number=0,
    before=[8, 8],
    after=[9, 7],
    moved_states=1,
    longest_gap_ms=80.0,
    usual_gap_ms=50.0,
    token_ms=40.0,
    tokens_per_s=100.0,
    usual_tokens_per_s=125.0,
    prepare_ms=200.0,
    load_ms=1.0,
    patch_ms=12.0,
    wait_ms=8.0,
    copied_bytes=5_000_000,
    patched_bytes=34_000_000,
)


def test_of_the_layers_that_move_those_with_states_are_counted() -> None:
    preset = PRESETS["0.45b-hybrid"]
    assert isinstance(preset, HybridPreset)
    # The eighth layer attends.
    assert count_states(preset.layer_types, [8, 8], [7, 9]) == 0
    assert count_states(preset.layer_types, [8, 8], [9, 7]) == 1
    assert count_states(preset.layer_types, [8, 8], [4, 12]) == 3
    assert count_states((), [8, 8], [4, 12]) == 0


def test_moves_with_and_without_states_have_rows_of_their_own() -> None:
    without = replace(COST, moved_states=0, longest_gap_ms=53.0)
    rows = move_table([COST, without, replace(COST, longest_gap_ms=90.0)]).splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[:5] for row in cells] == [
        ["0.45b-hybrid", "resident", "0", "1", "53"],
        ["0.45b-hybrid", "resident", "1", "2", "85 (80.1 to 89.9)"],
    ]
    assert [row[6] for row in cells] == ["3", "35 (30.1 to 39.9)"]
    assert cells[0][-3:] == ["20", "5", "34"]
