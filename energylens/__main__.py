"""``python -m energylens``."""

from energylens.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
