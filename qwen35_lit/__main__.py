"`python -m qwen35_lit` is the command `qwen35-lit`"
import sys
from qwen35_lit.cli import main

if __name__ == "__main__": sys.exit(main())
