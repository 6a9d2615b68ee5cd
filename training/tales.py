"""Write documents of the tiny hybrid's own language, for recipes to train and measure on.

    python training/tales.py --out DIR [--documents 1400]

DIR/tales.jsonl then has one document a line, of 1,024 words each. They are of seeds that neither
the hybrid nor any published measurement has seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvfold.evaluation.report import write_atomically
from kvfold.evaluation.tiny_language import training_document

WORDS = 1024


def tales(count: int) -> str:
    """So many documents as JSON lines."""
    made = (" ".join(training_document(f"recipe {n}", WORDS)[0]) for n in range(count))
    return "".join(json.dumps({"text": text}) + "\n" for text in made)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=1400)
    chosen = parser.parse_args()
    write_atomically(chosen.out / "tales.jsonl", tales(chosen.documents).encode())


if __name__ == "__main__":
    main()
