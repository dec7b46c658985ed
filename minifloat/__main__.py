"""`python -m minifloat` is the `minifloat` command."""

from minifloat.tools.cli import main

if __name__ == "__main__":
    main()
