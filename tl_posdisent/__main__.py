"""``python -m tl_posdisent`` is the command ``tl-posdisent``."""

from tl_posdisent.cli import app

if __name__ == "__main__":
    app()
