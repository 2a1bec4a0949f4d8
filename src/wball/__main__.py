"""``python -m wball``: the command line."""

from wball.cli import entry

if __name__ == "__main__":
    entry()
