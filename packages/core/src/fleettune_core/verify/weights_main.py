"""Compares two model folders, weight by weight: `python -m fleettune_core.verify.weights_main LEFT RIGHT`.

A process of its own, because the control process has no torch. Prints one JSON object: `rms`, the root of the mean
squared difference of all weights; `largest`, the largest difference of one; `missing`, names that one folder alone has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def compare_folders(left: Path, right: Path) -> dict[str, Any]:
    """Read weight by weight, so that neither model is in memory as a whole."""
    from contextlib import ExitStack

    from safetensors import safe_open

    with ExitStack() as stack:
        sides: list[dict[str, Any]] = []
        for folder in (left, right):
            places: dict[str, Any] = {}
            for file in sorted(folder.glob("*.safetensors")):
                opened = stack.enter_context(safe_open(file, framework="pt"))
                places.update(dict.fromkeys(opened.keys(), opened))
            sides.append(places)
        mine, yours = sides
        squares, count, largest = 0.0, 0, 0.0
        for name in mine.keys() & yours.keys():
            one, other = mine[name].get_tensor(name), yours[name].get_tensor(name)
            if one.shape != other.shape:
                squares = largest = float("inf")
                continue
            distance = (one.double() - other.double()).abs()
            count += distance.numel()
            squares += float(distance.square().sum())
            largest = max(largest, float(distance.max()))
        rms = (squares / max(1, count)) ** 0.5
        missing = sorted(mine.keys() ^ yours.keys())
        return {"rms": rms, "largest": largest, "missing": missing}


if __name__ == "__main__":
    print(json.dumps(compare_folders(Path(sys.argv[1]), Path(sys.argv[2]))))
