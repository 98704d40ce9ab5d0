"""Make pictures of every page and dialog: `python -m tests.gui.screenshots FOLDER [--scale 2]`.

Light and dark, 1280 x 800 logical pixels, from the fake core; needs no display. Look at each one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Write the pictures into the folder and return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", default="1", help="2 for a dense screen")
    parser.add_argument("--only", default="", help="part of a picture's name")
    chosen = parser.parse_args()
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ["QT_SCALE_FACTOR"] = chosen.scale
    from tests.gui.pictures import take_pictures

    chosen.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        for path in take_pictures(chosen.folder, Path(logs), chosen.scale, chosen.only):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
