"""``python -m tinyllama``."""

import sys

from tinyllama.cli import main

sys.exit(main())
