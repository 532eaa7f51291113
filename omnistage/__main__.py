"""`python -m omnistage`."""

import sys

from omnistage.entrypoints.cli.main import main

sys.exit(main())
