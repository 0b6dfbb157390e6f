"""`python -m medusa_jax.study`."""

import sys

from medusa_jax.study.command import main

if __name__ == "__main__":
    sys.exit(main())
