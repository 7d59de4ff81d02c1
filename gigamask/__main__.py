"""`python -m gigamask`, the same as the command `gigamask`."""

import sys

from gigamask.cli.main import main

sys.exit(main())
