"""Python tests import the workers and test/fixtures as the workers import each other: flat."""

import sys
from pathlib import Path

TEST = Path(__file__).resolve().parent
sys.path[:0] = [str(TEST.parent / "workers"), str(TEST / "fixtures")]
