"""`make image-check` with programs in the place of buildah and debootstrap: what it asks for and refuses.

What the image is like only the check itself can show.
"""

from __future__ import annotations

import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from harness.pages import ROOT

from paceline.demo import DEFAULT_PROMPT
from tools import image_check
from tools.image_check import Buildah, base_image, check, completion, named_files, pip_file, pip_settings

SAID = "With and without speculation\n\nBoth ways gave the same 5 tokens.\n"
DEMO = f"Starting …\n\n{DEFAULT_PROMPT}        return 1\n\n{SAID}"
BUILDAH = """#!__EXECUTABLE__
import json, sys
from pathlib import Path
folder = Path(__file__).parent
words = sys.argv[sys.argv.index("--runroot") + 2:]
log = folder / "asked"
with log.open("a") as file:
    file.write(json.dumps(words) + "\\n")
said = json.loads((folder / "answers").read_text())
builds = log.read_text().count('["bud"')
if words[0] == "run":
    print(next((answer for program, answer in said.items() if program in words), ""))
elif words[0] == "inspect":
    print(json.dumps({"OCIv1": {"rootfs": {"diff_ids": said["layers"][builds - 1]}}}))
elif words[0] == "images":
    print(json.dumps([{"size": "1 GB"}]))
else:
    print("container" if words[0] == "from" else folder)
"""
ANSWERS = {
    "--version": "Python 3.11.2",
    "id": "10001",
    "pip": "",
    "demo": DEMO,
    "layers": [["a", "b", "c"], ["a", "b", "d"]],
}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that come first; `asked` in it lists what buildah was asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "buildah").write_text(BUILDAH.replace("__EXECUTABLE__", sys.executable))
    (folder / "debootstrap").write_text("#!/bin/sh\n")
    for program in folder.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    here = tmp_path / "here"
    here.write_text(f"print({DEMO!r})")
    monkeypatch.setattr(image_check, "DEMO_HERE", (sys.executable, str(here)))
    return folder


def run(programs: Path, tmp_path: Path, **answers: object) -> list[list[str]]:
    (programs / "answers").write_text(json.dumps(ANSWERS | answers))
    folder = tmp_path / "storage"
    folder.mkdir()
    check(Buildah("vfs", folder), Namespace(suite="bookworm", mirror=None, torch_index="https://index/cpu"))
    return [json.loads(line) for line in (programs / "asked").read_text().splitlines()]


def test_the_image_is_built_twice_and_its_demo_run(programs: Path, tmp_path: Path) -> None:
    asked = run(programs, tmp_path)
    first, second = (words for words in asked if words[0] == "bud")
    assert first == second
    context = Path(first[-1])
    assert first[first.index("--file") + 1] == str(context / "deploy/Dockerfile")
    assert "TORCH_INDEX=https://index/cpu" in first
    assert "--pull-never" in first
    assert f"{context.parent / 'pip.conf'}:/etc/pip.conf:ro" in first
    assert ["commit", "--rm", "container", "docker.io/library/python:3.11-slim"] in asked
    assert ["run", "container", "--", "paceline", "demo"] in asked
    assert (context / "paceline/__init__.py").read_text() == (
        ROOT / "paceline/__init__.py"
    ).read_text() + "\n"
    assert {path.name for path in context.iterdir()} == {
        *(".dockerignore", "deploy", "constraints.txt", "pyproject.toml", "README.md", "LICENSE"),
        *("paceline", "coordinator", "draft_worker", "target_worker"),
    }
    assert shutil.which("buildah") == str(programs / "buildah")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"--version": "Python 3.13.5"}, "another Python than 3.13.5"),
        ({"id": "0"}, "root"),
        ({"demo": DEMO.replace("return 1", "return 2")}, "other tokens in the image"),
        ({"demo": DEMO.replace("same 5", "wrong 5")}, "not what a demo writes"),
        ({"demo": "error: no model"}, "not what a demo writes"),
        ({"layers": [["a", "b", "c"], ["a", "e", "d"]]}, "last layer alone"),
        ({"layers": [["a", "b", "c"], ["a", "b", "c"]]}, "last layer alone"),
    ],
)
def test_a_wrong_image_is_refused(
    programs: Path, tmp_path: Path, answers: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(programs, tmp_path, **answers)


def test_pips_settings_and_their_files_are_taken_along(tmp_path: Path) -> None:
    index, wheels = tmp_path / "index/simple", tmp_path / "wheels"
    index.mkdir(parents=True)
    wheels.mkdir()
    listed = f"""
:env:.timeout='7'
global.extra-index-url='\\nfile://{index}\\nhttps://index.example/simple'
global.find-links='{wheels} {tmp_path}/none'
install.timeout='5'
""".strip()
    settings = pip_settings(listed)
    assert settings["timeout"] == "7", "the environment's come first"
    assert named_files(settings) == [index.parent, wheels]
    assert pip_file(settings).splitlines() == [
        "[global]",
        f"extra-index-url = file://{index} https://index.example/simple",
        f"find-links = {wheels} {tmp_path}/none",
        "timeout = 7",
    ]


def test_the_demos_text_is_found() -> None:
    assert completion(DEMO) == "        return 1"


def test_one_base_image_is_allowed() -> None:
    assert base_image((ROOT / "deploy/Dockerfile").read_text()) == "python:3.11-slim"
    with pytest.raises(ValueError, match="too many"):
        base_image("FROM a:1\nFROM b:2\n")
