"""Compose files as docker compose resolves them, without it: anchors, variables, several files, profiles.

What the project's files do not use is refused, not guessed: other forms of variables, tags, `extends`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from harness.pages import ROOT

Service = dict[str, Any]

MAIN = "docker-compose.yml"
SECURE = "deploy/compose.secure.yml"
ONE_GPU = "deploy/one-gpu.yml"

_VARIABLE = re.compile(r"\$(?:\$|\{(\w+):-([^}$]*)\})")
_REPLACED = frozenset({"command", "entrypoint", "test"})
"""Lists of which a later file's takes the place of an earlier one's. Other lists grow."""


@dataclass(frozen=True)
class Project:
    """The content of compose files together."""

    services: dict[str, Service]
    volumes: dict[str, Any]

    def enabled(self, names: Iterable[str] = (), profiles: Collection[str] = ()) -> set[str]:
        """The services that `docker compose --profile PROFILES COMMAND NAMES` knows.

        To name a service activates its profiles. Raises AssertionError if one depends on what is not enabled.
        """
        active = set(profiles)
        for name in names:
            own = self.services[name].get("profiles", [])
            if not active & set(own):
                active |= set(own)
        found = {
            name for name, s in self.services.items() if not s.get("profiles") or active & set(s["profiles"])
        }
        for name in found:
            assert self.dependencies(name) <= found, f"{name} depends on a service of another profile"
        return found

    def started(self, *names: str, profiles: Collection[str] = ()) -> set[str]:
        """The services that `docker compose --profile PROFILES up NAMES` starts."""
        enabled = self.enabled(names, profiles)
        wanted, found = list(names or enabled), set[str]()
        while wanted:
            name = wanted.pop()
            if name not in found:
                found.add(name)
                wanted += self.dependencies(name)
        return found

    def dependencies(self, name: str) -> set[str]:
        """The services that this one depends on itself."""
        return set(self.services[name].get("depends_on", ()))

    def names_of(self, name: str) -> set[str]:
        """What other services reach this one by."""
        networks = self.services[name].get("networks", {})
        return {name, *networks.get("default", {}).get("aliases", [])}

    def behind(self, host: str, started: Collection[str]) -> set[str]:
        """The services among the started ones whose containers a host name resolves to."""
        return {name for name in started if host in self.names_of(name)}


def read(*files: str, environment: Mapping[str, str] | None = None) -> Project:
    """The files merged in order, with variables replaced; `docker-compose.yml` if none is named."""
    content: dict[str, Any] = {}
    for file in files or (MAIN,):
        text = (ROOT / file).read_text()
        _refuse_doubles(yaml.compose(text, yaml.SafeLoader))
        content = _merged(content, _interpolated(yaml.safe_load(text), environment or {}))
    return Project(content["services"], content.get("volumes", {}))


def _refuse_doubles(node: yaml.Node | None) -> None:
    """As compose does; PyYAML takes the last of two equal keys."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is given twice: {keys}"
    if isinstance(node, yaml.CollectionNode):
        for each in node.value:
            for part in each if isinstance(each, tuple) else (each,):
                _refuse_doubles(part)


def options(service: Service) -> dict[str, str]:
    """The `--name=value` options of a service's command."""
    return dict(word.removeprefix("--").split("=", 1) for word in service["command"][1:])


def mounts(service: Service) -> dict[str, str]:
    """Sources by their places in the container."""
    return {_place(volume): volume.removesuffix(":ro").rpartition(":")[0] for volume in service["volumes"]}


def _place(volume: str) -> str:
    return volume.removesuffix(":ro").rpartition(":")[2]


def _interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """Variables in values are replaced; keys have none."""
    if isinstance(value, dict):
        return {key: _interpolated(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_interpolated(each, environment) for each in value]
    if not isinstance(value, str):
        return value
    assert "$" not in _VARIABLE.sub("", value), f"a variable in another form than ${{NAME:-default}}: {value}"
    return _VARIABLE.sub(lambda m: "$" if m[1] is None else environment.get(m[1]) or m[2], value)


def _merged(base: Any, later: Any, key: str = "") -> Any:
    """Mappings are merged, lists appended; a volume takes the place of one with the same place."""
    if isinstance(base, dict) and isinstance(later, dict):
        both = {name: _merged(base[name], later[name], name) for name in base.keys() & later.keys()}
        return {**base, **later, **both}
    if isinstance(base, list) and isinstance(later, list) and key not in _REPLACED:
        kept = base
        if key == "volumes":
            kept = [volume for volume in base if _place(volume) not in {_place(each) for each in later}]
        return kept + later
    return later
