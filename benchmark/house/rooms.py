"""Prints the rooms of the package, what each imports, and the arrows that go up.

    python -m benchmark.house.rooms
    python -m benchmark.house.rooms --tree ../another/work/tree

Takes a second. Counts lines as they are in the files, with comments and empty ones.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmark.house.import_graph import FLOORS, ROOT, arrows, room_of, source_files, upward


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table and the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="work tree, by default this one")
    root = parser.parse_args(argv).tree.resolve()
    files, lines = Counter[str](), Counter[str]()
    for path in source_files(root):
        files[room_of(path, root)] += 1
        lines[room_of(path, root)] += len(path.read_text().splitlines())
    found = arrows(root)
    order = {room: floor for floor, room in enumerate(FLOORS)}
    for room in sorted(files, key=lambda one: (order.get(one, len(order)), one)):
        imported = [other for importing, other in found if importing == room]
        imported.sort(key=lambda one: (order.get(one, len(order)), one))
        print(f"{room:<24}{files[room]:>4} files {lines[room]:>6} lines  {', '.join(imported)}")
    both = [pair for pair in found if pair[0] < pair[1] and pair[::-1] in found]
    print(f"\n{len(files)} rooms, {sum(files.values())} files, {sum(lines.values())} lines")
    print(f"{len(found)} arrows, {len(both)} pairs of rooms that import each other")
    if set(files) <= set(order):
        against = upward(root)
        print(f"{len(against)} imports go up", *against, sep="\n  ")


if __name__ == "__main__":
    main()
