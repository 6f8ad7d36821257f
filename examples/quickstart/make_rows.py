"""Write the quickstart's data: orders in English, and the same orders as strict JSON.

    python make_rows.py FOLDER

makes FOLDER/train.jsonl (320 rows) and FOLDER/heldout.jsonl (40 rows) of `prompt` and `completion`. The task can be
checked to the letter: an answer is right or it is not. No held-out order has its person, thing and town together in
any training row, so the answers cannot be known by heart. The same files every time.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NUM_TRAIN = 320
NUM_HELDOUT = 40
SEED = 20

INSTRUCTION = "Write the order as JSON with name, item, quantity, city, date (day/month)."

PEOPLE = (
    "Anna Ben Carla David Elena Felix Grace Hugo Irene Jonas Karin Liam Maria Noah Olga Paul Rosa Simon Tina Victor"
    " Alice Daniel Emma Thomas"
).split()
THINGS = {
    "lamp": "lamps", "chair": "chairs", "table": "tables", "camera": "cameras", "guitar": "guitars",
    "jacket": "jackets", "kettle": "kettles", "mirror": "mirrors", "radio": "radios", "carpet": "carpets",
    "ladder": "ladders", "clock": "clocks", "blanket": "blankets", "drum": "drums", "helmet": "helmets",
    "shelf": "shelves", "knife": "knives", "brush": "brushes", "box": "boxes", "battery": "batteries",
    "watch": "watches", "book": "books", "bottle": "bottles", "ticket": "tickets",
}  # fmt: skip
TOWNS = (
    "Berlin Paris Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Warsaw Zurich Geneva Hamburg Lyon Milan London"
    " Bristol Munich Naples Boston Tokyo Cairo Delhi"
).split()
NUMBERS = "two three four five six seven eight nine ten eleven twelve".split()
MONTHS = "January February March April May June July August September October November December".split()
SENTENCES = (
    "{name} from {city} orders {number} {items} for {day} {month}.",
    "On {month} {day}, send {number} {items} to {name} in {city}.",
    "{name} needs {number} {items} in {city} by {day} {month}.",
    "Please ship {number} {items} to {city} for {name}, due {month} {day}.",
    "By {day} {month} we must bring {name} {number} {items} in {city}.",
    "{city} wants {number} {items} on {month} {day}; ask for {name}.",
    "The {items}, {number} of them, go to {name} in {city} on {day} {month}.",
    "Deliver to {city} before {month} {day}: {number} {items} for {name}.",
)


@dataclass(frozen=True)
class Order:
    """One order, as the answer must give it."""

    name: str
    item: str
    quantity: int
    city: str
    month: int
    day: int

    def sentence(self, pattern: str) -> str:
        return pattern.format(
            name=self.name,
            number=NUMBERS[self.quantity - 2],
            items=THINGS[self.item],
            city=self.city,
            day=self.day,
            month=MONTHS[self.month - 1],
        )

    def answer(self) -> str:
        fields = {"name": self.name, "item": self.item, "quantity": self.quantity, "city": self.city}
        return json.dumps({**fields, "date": f"{self.day}/{self.month}"})


def is_held_out(order: Order) -> bool:
    """Whether this person, thing and town are kept together for the held-out rows: one combination in four."""
    places = (PEOPLE.index(order.name), list(THINGS).index(order.item), TOWNS.index(order.city))
    return sum(places) % 4 == 0


def rows(chance: random.Random, *, held_out: bool) -> Iterator[dict[str, str]]:
    """Endless rows of one side."""
    while True:
        order = Order(
            name=chance.choice(PEOPLE),
            item=chance.choice(list(THINGS)),
            quantity=chance.randint(2, 12),
            city=chance.choice(TOWNS),
            month=chance.randint(1, 12),
            day=chance.randint(1, 28),
        )
        sentence = order.sentence(chance.choice(SENTENCES))
        if is_held_out(order) == held_out:
            yield {"prompt": f"{INSTRUCTION}\n{sentence}\n", "completion": order.answer()}


def make_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The training rows and the held-out rows."""
    chance = random.Random(SEED)
    training, heldout = rows(chance, held_out=False), rows(chance, held_out=True)
    return [next(training) for _ in range(NUM_TRAIN)], [next(heldout) for _ in range(NUM_HELDOUT)]


def write(folder: Path) -> tuple[Path, Path]:
    """Write both files into `folder`; their paths, training first."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / "train.jsonl", folder / "heldout.jsonl")
    for path, content in zip(paths, make_rows(), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the two files go")
    for written in write(parser.parse_args().folder):
        print(written)
