"""``hyptree train`` with few dependencies: ``python -m hyptree.train RECIPE KEY=VALUE ... --out DIR``.

The folder of a run is a recipe too, and ``--resume`` goes on with it. Tables: ``python -m hyptree.train.compare``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hyptree.errors import exit_code
from hyptree.train.language import run


def main(argv: Sequence[str] | None = None) -> int:
    """The command; a mistake of the user is one line and exit code 2, an interruption 130."""
    words = sys.argv[1:] if argv is None else argv
    try:
        return exit_code(lambda: run(words, "python -m hyptree.train", __doc__))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
