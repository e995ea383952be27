"""``python -m ramify`` is the command ``ramify``."""

import sys

from ramify.cli import main

sys.exit(main())
