"""``python -m hyptree`` is the command ``hyptree``."""

import sys

from hyptree.cli import main

sys.exit(main())
