"""`python -m sumibi`: the same as the `sumibi` command."""

import sys

from sumibi.cli import main

sys.exit(main())
