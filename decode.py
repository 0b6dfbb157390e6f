"""Generate text with draft heads: `python decode.py --help`."""

import sys

from medusa_jax.commands.decode import main

if __name__ == "__main__":
    sys.exit(main())
