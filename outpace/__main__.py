"""``python -m outpace`` is the command ``outpace``."""

import sys

from outpace.cli.main import main

sys.exit(main())
