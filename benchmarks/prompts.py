"""Prompts of different length and kind, written for the benchmark; none of them is training text."""

PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n    ",
    (
        'class Queue:\n    """A bounded first-in first-out queue."""\n\n'
        "    def __init__(self, maxsize=0):\n        "
    ),
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n        ",
    (
        '"""Helpers for paths."""\n\nimport os\nimport sys\n\n\ndef normalize(path):\n'
        '    """Return the path with its separators in order."""\n    if not path:\n        raise ValueError('
    ),
    "def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n        ",
    (
        "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=__doc__)\n"
        "    parser.add_argument('-v', '--verbose', action='store_true',\n"
        "                        help='print more')\n    args = parser.parse_args()\n    "
    ),
)
