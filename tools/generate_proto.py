"""Generate `paceline/v1` from `proto/`: messages, services, and type stubs for both."""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from google.rpc import status_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "paceline" / "v1"


def generate(destination: Path) -> None:
    """Write the stubs of every file in `proto/` below `destination`. Raises RuntimeError."""
    includes = [
        ROOT / "proto",
        Path(str(resources.files("grpc_tools") / "_proto")),
        Path(status_pb2.__file__).parent.parent.parent,
    ]
    files = sorted((ROOT / "proto").rglob("*.proto"))
    plugin = shutil.which("protoc-gen-mypy", path=str(Path(sys.executable).parent))
    plugin_grpc = shutil.which("protoc-gen-mypy_grpc", path=str(Path(sys.executable).parent))
    arguments = [
        "protoc",
        *(f"-I{path}" for path in includes),
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--plugin=protoc-gen-mypy_grpc={plugin_grpc}",
        *(f"--{kind}_out={destination}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *(str(path) for path in files),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")


def main() -> None:
    """Replace the committed stubs."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        for old in STUBS.glob("*_pb2*"):
            old.unlink()
        for new in (Path(folder) / "paceline" / "v1").iterdir():
            shutil.copy(new, STUBS / new.name)


if __name__ == "__main__":
    main()
