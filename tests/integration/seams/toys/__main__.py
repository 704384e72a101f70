"""`paceline` with toy implementations behind its seams: `python FOLDER TOY[,TOY] COMMAND …`.

Each toy is one file here with one line in a registry of the product, written in its `register`.
"""

import importlib
import sys

for name in sys.argv.pop(1).split(","):
    importlib.import_module(name).register()

from paceline.__main__ import main  # noqa: E402  - what it loads reads the registries

if __name__ == "__main__":
    main()
