"""Builds deploy/Dockerfile without a container engine and runs the demo in the image: `make image-check`.

Linux, as root, with Debian's packages buildah and debootstrap. No image is pulled: the base is made of
Debian's own Python by debootstrap and named like the official image, which itself stays unchecked. In the
build pip has this machine's settings, and the files that they name.

It checks that

- a change of our code changes the image's last layer alone, so that the installed dependencies stay;
- the dependencies suit each other (`pip check`), and the image's user is not root;
- `paceline demo` gives the same tokens in the image as here, with and without speculation.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.demo import DEFAULT_PROMPT

ROOT: Final = Path(__file__).parents[1]
TAG: Final = "paceline:checked"
DEBIAN: Final = "python3,python3-venv,python-is-python3,ca-certificates"
"""What Debian's base lacks of the official image, as far as the build and the demo need it."""
DEMO_HERE: Final = (sys.executable, "-P", "-m", "paceline", "demo")


@dataclass(frozen=True)
class Buildah:
    """buildah with a storage of its own, so that images of this machine are neither used nor changed."""

    driver: str
    folder: Path

    def __call__(self, *words: str, quiet: bool = True) -> str:
        """Run one command; what it writes to standard output. Raises CalledProcessError."""
        storage = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        program = ("buildah", "--storage-driver", self.driver, *storage)
        environment = os.environ | {"TMPDIR": str(self.folder), "BUILDAH_ISOLATION": "chroot"}
        done = subprocess.run(
            [*program, *words],
            env=environment,
            stdout=subprocess.PIPE if quiet else sys.stderr,
            check=True,
            text=True,
        )
        return done.stdout or ""


def base_image(dockerfile: str) -> str:
    """The one image that all stages begin with, other than stages. Raises ValueError if there are several."""
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", dockerfile, re.MULTILINE)
    (base,) = {image for image, _ in stages} - {name for _, name in stages}
    return base


def pip_settings(listed: str) -> dict[str, str]:
    """pip's settings from `pip config list`, by name; the environment's come before those of files."""
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = ast.literal_eval(value)
    return found


def named_files(settings: Mapping[str, str]) -> list[Path]:
    """The files and folders of this machine that the settings name. An index's files may lie beside it."""
    words = [word for value in settings.values() for word in value.split()]
    indexes = {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
    files = {Path(word) for word in words if word.startswith("/")}
    return sorted(path for path in indexes | files if path.exists())


def pip_file(settings: Mapping[str, str]) -> str:
    """The settings as one configuration file."""
    lines = [f"{name} = {' '.join(value.split())}" for name, value in settings.items()]
    return "\n".join(["[global]", *lines, ""])


def completion(output: str) -> str:
    """The text that a demo streamed. Raises ValueError if both ways did not give the same tokens."""
    streamed = re.search(re.escape(DEFAULT_PROMPT) + r"(.*?)\n\nWith and without", output, re.DOTALL)
    if streamed is None or not re.search(r"^Both ways gave the same \d+ tokens\.$", output, re.MULTILINE):
        raise ValueError(f"not what a demo writes:\n{output}")
    return streamed[1]


def copy_context(folder: Path) -> None:
    """What the build reads: the files that .dockerignore lets in, and itself."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in [".dockerignore", "deploy/Dockerfile", *(line[1:] for line in ignored if line[:1] == "!")]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


def make_base(buildah: Buildah, image: str, suite: str, mirror: str | None) -> None:
    """Debian's Python under the name of the base image. Raises ValueError if its version is another one."""
    container = buildah("from", "scratch").strip()
    place = buildah("mount", container).strip()
    words = ["debootstrap", "--variant=minbase", f"--include={DEBIAN}", suite, place]
    subprocess.run([*words, *([mirror] if mirror else [])], check=True, stdout=subprocess.DEVNULL)
    buildah("umount", container)
    version = buildah("run", container, "--", "python", "--version").split()[1]
    wanted = re.search(r":(\d+\.\d+)", image)
    if wanted is None or not version.startswith(f"{wanted[1]}."):
        raise ValueError(f"{image} is to have another Python than {version} of {suite}")
    buildah("commit", "--rm", container, f"docker.io/library/{image}")


def build(buildah: Buildah, context: Path, index: str, mounts: Sequence[str]) -> list[str]:
    """Build the image; its layers, the oldest first."""
    volumes = [word for mount in mounts for word in ("--volume", mount)]
    words = ["--layers", "--pull-never", "--build-arg", f"TORCH_INDEX={index}", *volumes, "--tag", TAG]
    buildah("bud", *words, "--file", str(context / "deploy/Dockerfile"), str(context), quiet=False)
    inspected: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", TAG))
    layers: list[str] = inspected["OCIv1"]["rootfs"]["diff_ids"]
    return layers


def check(buildah: Buildah, asked: argparse.Namespace) -> None:
    """All checks. Raises CalledProcessError or ValueError."""
    folder = buildah.folder
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    settings = pip_settings(listed.stdout)
    (folder / "pip.conf").write_text(pip_file(settings))
    mounts = [f"{folder / 'pip.conf'}:/etc/pip.conf:ro", *(f"{p}:{p}:ro" for p in named_files(settings))]
    context = folder / "context"
    copy_context(context)

    with step("the base image"):
        image = base_image((context / "deploy/Dockerfile").read_text())
        make_base(buildah, image, asked.suite, asked.mirror)
    with step("the image"):
        first = build(buildah, context, asked.torch_index, mounts)
    images = json.loads(buildah("images", "--json", TAG))
    print(f"size: {images[0]['size']}", flush=True)

    container = buildah("from", "--pull-never", TAG).strip()
    user = buildah("run", container, "--", "id", "-u").strip()
    if user == "0":
        raise ValueError("the process's user is root")
    buildah("run", container, "--", "python", "-m", "pip", "check", quiet=False)
    with step("the demo, in the image and here"):
        there = completion(buildah("run", container, "--", "paceline", "demo"))
        here = subprocess.run(DEMO_HERE, check=True, stdout=subprocess.PIPE, text=True)
        if there != completion(here.stdout):
            raise ValueError("the demo gave other tokens in the image than here")

    with step("the image after a change of our code"):
        with (context / "paceline/__init__.py").open("a") as file:
            file.write("\n")
        second = build(buildah, context, asked.torch_index, mounts)
    if first[:-1] != second[:-1] or first[-1] == second[-1]:
        raise ValueError(f"not the last layer alone has changed: {first}, {second}")


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Print how long the block took."""
    begun = time.monotonic()
    yield
    print(f"{name}: {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


def main() -> None:
    """Check, and leave nothing behind."""
    parser = argparse.ArgumentParser(description="See the module's documentation.")
    parser.add_argument("--suite", default="bookworm", help="Debian release with the base image's Python")
    parser.add_argument("--mirror", help="where debootstrap finds it, if not at its own default")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument("--storage-driver", default="overlay", help="vfs works on every file system, slowly")
    asked = parser.parse_args()
    if os.geteuid() != 0 or not all(shutil.which(name) for name in ("buildah", "debootstrap")):
        parser.error("root, buildah and debootstrap are needed")
    with tempfile.TemporaryDirectory(prefix="paceline-image-") as folder:
        buildah = Buildah(asked.storage_driver, Path(folder))
        try:
            check(buildah, asked)
        except ValueError as error:
            sys.exit(f"error: {error}")
        except subprocess.CalledProcessError as error:
            sys.exit(f"error: {' '.join(error.cmd)} ended with {error.returncode}")
        finally:
            buildah("rm", "--all")  # unmounts them
            buildah("rmi", "--all", "--force")
    print("The image is right.")


if __name__ == "__main__":
    main()
