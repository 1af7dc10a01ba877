"""`python -m titan_mega_moe`: the command line, as `titan-mega-moe` starts it."""

import sys

from titan_mega_moe.cli import main

if __name__ == "__main__":
    sys.exit(main())
