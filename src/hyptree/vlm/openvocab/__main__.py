"""``hyptree vlm train-scale`` and ``eval-openvocab`` without the command line's dependencies.

python -m hyptree.vlm.openvocab train RECIPE KEY=VALUE ... --out DIR [--resume]
python -m hyptree.vlm.openvocab eval DETECTOR_RUN SEGMENTER_RUN [--limit N] [--device cuda] [--out FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hyptree.errors import exit_code, one_line_parser
from hyptree.files import write_text


def main(argv: Sequence[str] | None = None) -> int:
    """The command; a mistake of the user is one line and exit code 2, an interruption 130."""
    parser = one_line_parser("python -m hyptree.vlm.openvocab", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("train", help="train a recipe and compare before with after")
    train.add_argument("recipe", type=Path)
    train.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--resume", action="store_true")
    score = verbs.add_parser("eval", help="AP and PQ of base and novel classes")
    score.add_argument("detector", type=Path)
    score.add_argument("segmenter", type=Path)
    score.add_argument("--limit", type=int)
    score.add_argument("--text-weight", type=float, default=0.5)
    score.add_argument("--device", default="cpu")
    score.add_argument("--out", type=Path)

    def command() -> int:
        given = parser.parse_args(argv)
        if given.verb == "train":
            from hyptree.config import load
            from hyptree.train.run.recipe import Recipe
            from hyptree.train.tasks.openvocab_job import report_lines, train_and_report

            recipe = load(Recipe, given.recipe, given.overrides)
            report = train_and_report(recipe, given.out, resume=given.resume)
            print("\n".join(report_lines(report)) if report else "", end="\n" if report else "")
            return 0
        from hyptree.train.openvocab import evaluate_openvocab

        found = evaluate_openvocab(
            given.detector,
            given.segmenter,
            limit=given.limit,
            text_weight=given.text_weight,
            device=given.device,
        )
        if given.out is not None:
            write_text(given.out, json.dumps(found, indent=2) + "\n")
        print(json.dumps(found))
        return 0

    try:
        return exit_code(command)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
