"""Reading a run's metrics while it writes them: only what is new, only whole lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class MetricsTail:
    """The end of `metrics.jsonl`, remembered by its offset."""

    path: Path
    offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Lines that were completed since the last call, in order; none while the file does not exist.

        A file that became shorter was written anew (a restart): it is read from its beginning.
        """
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.offset:
                    self.offset = 0
                file.seek(self.offset)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
