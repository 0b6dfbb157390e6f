"""`python -m medusa_jax.compare_drafters`."""

import sys

from medusa_jax.compare_drafters.command import main

if __name__ == "__main__":
    sys.exit(main())
