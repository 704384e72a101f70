"""The image's Dockerfile without building it: its stages, its layers, and instructions that run here.

`make image-check` builds it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.pages import ROOT

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
CODE = {"paceline", "coordinator", "draft_worker", "target_worker"}


@dataclass(frozen=True)
class Instruction:
    """One line of the file, with the lines that continue it."""

    stage: str
    name: str
    words: str

    @property
    def stages(self) -> set[str]:
        """The stages that it reads from."""
        found = re.match(r"--from=(\S+) ", self.words) if self.name == "COPY" else None
        return {found[1]} if found else set()

    @property
    def sources(self) -> set[str]:
        """The files of the checkout that it copies."""
        return set(self.words.split()[:-1]) if self.name == "COPY" and not self.stages else set()


def instructions(text: str = DOCKERFILE) -> Iterator[Instruction]:
    """All of them, with the stage that each is in; the last stage has no name."""
    stage = ""
    for line in re.sub(r"\\\n", "", text).splitlines():
        name, _, words = line.partition(" ")
        if name == "FROM":
            _, _, stage = words.partition(" AS ")
            yield Instruction(stage, name, words.split()[0])
        elif name and not line.startswith("#"):
            yield Instruction(stage, name, words.strip())


def sources_of(stage: str, text: str) -> set[str]:
    """The files of the checkout on which a stage depends."""
    found = set[str]()
    for each in instructions(text):
        if each.stage == stage:
            others = each.stages | ({each.words} if each.name == "FROM" else set())
            found |= each.sources.union(*(sources_of(other, text) for other in others if other != stage))
    return found


def check_layers(text: str) -> None:
    """What is installed of others depends on none of our code, which comes last into the image."""
    found = list(instructions(text))
    (installing,) = {each.stage for each in found if "pip install -c" in each.words}
    assert sources_of(installing, text) == {"constraints.txt", "pyproject.toml"}
    # pyproject.toml only through a file that changes less often.
    assert set[str]().union(*(each.sources for each in found if each.stage == installing)) == {
        "constraints.txt"
    }
    *before, last = (each for each in found if each.stage == "" and each.name in ("RUN", "COPY"))
    assert set[str]().union(*(sources_of(stage, text) for stage in last.stages)) >= CODE
    for each in before:
        assert not CODE & each.sources.union(*(sources_of(stage, text) for stage in each.stages))


def test_a_change_of_our_code_keeps_the_dependencies() -> None:
    check_layers(DOCKERFILE)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("COPY constraints.txt ./", "COPY constraints.txt README.md ./"),
        ("COPY --from=requirements /requirements.txt ./", "COPY pyproject.toml ./"),
        ("FROM dependencies AS code\n", "FROM dependencies AS code\nRUN pip install -c constraints.txt x\n"),
        ("COPY --from=code /opt/code /opt/paceline", "COPY --from=code /opt/code /opt/paceline\nRUN true"),
        ("COPY --from=dependencies /opt/paceline", "COPY --from=code /opt/paceline"),
    ],
)
def test_a_lost_layer_is_noticed(old: str, new: str) -> None:
    assert DOCKERFILE.count(old) == 1
    with pytest.raises((AssertionError, ValueError)):
        check_layers(DOCKERFILE.replace(old, new))


def test_the_image_installs_what_the_processes_require(tmp_path: Path) -> None:
    """The instruction that lists requirements runs here."""
    (step,) = (each.words for each in instructions() if each.stage == "requirements" and each.name == "RUN")
    listed = tmp_path / "requirements.txt"
    here = step.replace("python ", f"{sys.executable} ", 1).replace("/requirements.txt", str(listed))
    subprocess.run(["/bin/sh", "-ec", here], cwd=ROOT, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["worker"], *extras["coordinator"], *extras["otel"]]
    assert sorted(listed.read_text().splitlines()) == sorted(required)
    assert not any(line.startswith("paceline[") for line in required), (
        "an extra of another would be installed"
    )


def test_the_process_is_not_root() -> None:
    assert [each.words for each in instructions() if each.name == "USER"] == ["paceline"]
    assert [each.words for each in instructions() if each.name == "ENTRYPOINT"] == ['["paceline"]']
    # Each service checks its own port.
    assert "HEALTHCHECK" not in {each.name for each in instructions()}


@pytest.mark.parametrize(
    ("index", "installs"),
    [
        ("https://pypi.org/simple", True),
        ("https://download.pytorch.org/whl/cu126", True),
        ("https://download.pytorch.org/whl/cpu", False),
    ],
)
def test_the_gpu_image_has_a_compiler(tmp_path: Path, index: str, installs: bool) -> None:
    """Triton needs one. The instruction runs here, with programs that only tell what they are asked."""
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "\nARG TORCH_INDEX\n" in last
    (step,) = re.findall(r"^RUN (case (?:.*\\\n)+.*esac)$", last, re.MULTILINE)
    for name in ("apt-get", "rm"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "TORCH_INDEX": index}
    done = subprocess.run(
        ["/bin/sh", "-ec", step], env=environment, capture_output=True, text=True, check=True
    )
    packages = {word for line in done.stdout.splitlines() if " install " in line for word in line.split()}
    assert ({"gcc", "libc6-dev"} <= packages) is installs
    assert bool(done.stdout) is installs
    (folder,) = re.findall(r"TRITON_CACHE_DIR=(\S+)", last)
    assert folder.startswith("/home/paceline/.cache/")


def test_dockerignore_allows_exactly_the_copied_files() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for each in instructions() for source in each.sources} == allowed
