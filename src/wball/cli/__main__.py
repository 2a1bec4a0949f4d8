"""``python -m wball.cli``."""

from wball.cli import entry

if __name__ == "__main__":
    entry()
