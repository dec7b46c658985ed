"""`python -m minifloat` is the `minifloat` command."""

from minifloat.cli import main

if __name__ == "__main__":
    main()
