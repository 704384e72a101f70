"""The compose files without a container engine: what each command starts, and how the services are wired.

What this cannot show: that the image builds (`make image-check`), that images of others start, and that the
NVIDIA runtime hands each worker its GPU.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness import compose
from harness.compose import MAIN, ONE_GPU, ROOT, SECURE, Project, Service, mounts, options
from harness.parsing import docker_compose, paceline

from paceline.core.config import CoordinatorConfig, WorkerConfig
from paceline.rpc.server.server import FAREWELL_SECONDS

ROLES = ("coordinator", "target-worker", "draft-worker")
GPU = set(ROLES)
CPU = {f"{role}-cpu" for role in ROLES}
MONITORING = {"prometheus", "grafana"}
COORDINATORS = ("coordinator", "coordinator-cpu")
WORKERS = ("target-worker", "target-worker-2", "draft-worker", "target-worker-cpu", "draft-worker-cpu")
OURS = (*COORDINATORS, *WORKERS)
LOAD_TESTS = ("loadtest", "loadtest-cpu")
FILES = ((MAIN,), (MAIN, SECURE))

COMMANDS: list[tuple[tuple[str, ...], tuple[str, ...], set[str]]] = [
    ((), (), GPU),
    ((), ("monitoring",), GPU | MONITORING),
    ((), ("second-target",), GPU | {"target-worker-2"}),
    ((), ("loadtest",), GPU | {"loadtest"}),
    ((), ("monitoring", "loadtest", "second-target"), GPU | MONITORING | {"loadtest", "target-worker-2"}),
    (("coordinator-cpu",), (), CPU),
    (("coordinator-cpu", "grafana"), (), CPU | MONITORING),
    (("loadtest",), (), GPU | {"loadtest"}),
    (("loadtest-cpu",), (), CPU | {"loadtest-cpu"}),
    (("loadtest-cpu", "grafana"), (), CPU | MONITORING | {"loadtest-cpu"}),
]
"""Names and profiles of `docker compose up`, and what it starts."""


def read(environment: dict[str, str] | None = None) -> dict[str, Service]:
    return compose.read(environment=environment).services


def role_of(name: str) -> str:
    return name.removesuffix("-cpu").removesuffix("-2")


def gpus(service: Service) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    ids: list[str] = device["device_ids"]
    return ids


# ---- what is started ------------------------------------------------------------------------------


@pytest.mark.parametrize("files", FILES, ids=" ".join)
@pytest.mark.parametrize(("names", "profiles", "wanted"), COMMANDS)
def test_a_command_starts_its_services(
    names: tuple[str, ...], profiles: tuple[str, ...], wanted: set[str], files: tuple[str, ...]
) -> None:
    assert compose.read(*files).started(*names, profiles=profiles) == wanted


def docker_compose_program() -> list[str]:
    """Docker compose where it is installed; it reads files without an engine."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) is not None:
            said = subprocess.run([*words, "version", "--short"], capture_output=True, text=True, check=False)
            if said.returncode == 0 and not said.stdout.startswith("1."):
                return words
    pytest.skip("docker compose is not installed")


@pytest.mark.parametrize(("names", "profiles", "wanted"), COMMANDS)
def test_docker_compose_starts_the_same(
    names: tuple[str, ...], profiles: tuple[str, ...], wanted: set[str]
) -> None:
    given = [word for profile in profiles for word in ("--profile", profile)]
    words = [*docker_compose_program(), *given, "config", "--format", "json", *names]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout)["services"].keys() == wanted


@pytest.mark.parametrize("file", [MAIN, SECURE, ONE_GPU])
def test_commands_in_a_files_comments_are_taken(file: str) -> None:
    text = (ROOT / file).read_text()
    commands = re.findall(r"^# +docker compose (.+?)(?: {2,}.*)?$", text, re.MULTILINE)
    assert commands
    for command in commands:
        docker_compose(shlex.split(command, comments=True))


def test_every_profile_has_a_command() -> None:
    """And there is none that would start nothing by itself, or services for want of a GPU."""
    services = read()
    profiles = {name: service.get("profiles", []) for name, service in services.items()}
    assert {each for own in profiles.values() for each in own} == {
        "cpu",
        *(each for _, asked, _ in COMMANDS for each in asked),
    }
    assert {name for name, own in profiles.items() if own == ["cpu"]} == {*CPU, "loadtest-cpu"}
    assert {name for name in services if name not in OURS} == {*MONITORING, *LOAD_TESTS}


@pytest.mark.parametrize(("names", "profiles", "wanted"), COMMANDS)
def test_host_names_lead_to_started_services(
    names: tuple[str, ...], profiles: tuple[str, ...], wanted: set[str]
) -> None:
    """Each worker is followed by its coordinator through the name of its role, a second target too."""
    project = compose.read()
    services = project.services
    (coordinator,) = wanted & {*COORDINATORS}
    for option in ("target", "draft"):
        scheme, host, port = options(services[coordinator])[option].split(":")
        assert scheme == "dns"
        behind = project.behind(host, wanted)
        assert behind == {name for name in wanted & {*WORKERS} if name.startswith(option)}
        for name in behind:
            assert (options(services[name])["port"], options(services[name])["host"]) == (port, "0.0.0.0")
    for name in wanted & {*LOAD_TESTS}:
        host, port = services[name]["environment"]["PACELINE_ADDRESS"].split(":")
        assert project.behind(host, wanted) == {coordinator}
        assert options(services[coordinator])["port"] == port


def test_workers_can_be_scaled() -> None:
    """Replicas cannot share a container's name or a port of the host."""
    services = read()
    for name in WORKERS:
        assert services[name].keys().isdisjoint({"container_name", "hostname", "ports", "scale"}), name
        assert "replicas" not in services[name].get("deploy", {})


@pytest.mark.planted
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services: {a: {image: i, depends_on: [b]}, b: {profiles: [p]}}", "another profile"),
        ("services: {a: {image: i, image: j}}", "given twice"),
        ("services: {a: {image: '${IMAGE}'}}", "another form"),
        ("services: {a: {image: '${IMAGE:?}'}}", "another form"),
    ],
)
def test_a_wrong_compose_file_is_noticed(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "compose.yml"
    file.write_text(text)
    with pytest.raises(AssertionError, match=message):
        compose.read(str(file)).started()


def test_files_and_variables_are_resolved(tmp_path: Path) -> None:
    base, later = tmp_path / "base.yml", tmp_path / "later.yml"
    base.write_text(
        "x-a: &a {image: '${I:-i}', environment: {A: '1', B: '$$b'}}\n"
        "services: {s: {<<: *a, command: [x], volumes: ['v:/p', 'w:/q:ro'], profiles: [p]}, t: {<<: *a}}"
    )
    later.write_text("services: {s: {command: [y], volumes: ['./f:/q'], environment: {B: '2'}}}")
    project = compose.read(str(base), str(later), environment={"I": "j"})
    assert project == Project(
        {
            "s": {
                "image": "j",
                "environment": {"A": "1", "B": "2"},
                "command": ["y"],
                "volumes": ["v:/p", "./f:/q"],
                "profiles": ["p"],
            },
            "t": {"image": "j", "environment": {"A": "1", "B": "$b"}},
        },
        {},
    )
    assert compose.read(str(base), environment={"I": ""}).services["t"]["image"] == "i"
    assert (project.started(), project.started("s")) == ({"t"}, {"s"})


# ---- the three roles ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OURS, *LOAD_TESTS])
def test_a_services_command_is_taken(name: str) -> None:
    service = read()[name]
    entrypoint = service.get("entrypoint", ["paceline"])
    assert entrypoint[0] == "paceline"
    paceline([*entrypoint[1:], *service["command"]])
    assert service["init"] is True
    assert service["image"] == ("paceline:cpu" if name.endswith("-cpu") else "paceline:cuda")


def test_each_gpu_worker_reserves_its_own_gpu() -> None:
    services = read()
    names = ("draft-worker", "target-worker", "target-worker-2")
    assert [gpus(services[name]) for name in names] == [["0"], ["1"], ["2"]]
    chosen = read(
        {
            "PACELINE_DRAFT_GPU": "3",
            "PACELINE_TARGET_GPU": "GPU-8f2",
            "PACELINE_SECOND_TARGET_GPU": "GPU-9a1",
        }
    )
    assert [gpus(chosen[name]) for name in names] == [["3"], ["GPU-8f2"], ["GPU-9a1"]]
    assert [name for name in services if "deploy" in services[name] and name not in names] == []


def test_only_the_gpu_workers_use_cuda() -> None:
    services = read()
    for role in ("target-worker", "draft-worker"):
        gpu, cpu = options(services[role]), options(services[f"{role}-cpu"])
        assert (gpu.pop("device"), cpu.pop("device")) == ("cuda", "cpu")
        cpu.pop("threads")
        assert gpu == cpu


def test_a_second_target_differs_in_gpu_and_profile() -> None:
    services = read()
    first, second = services["target-worker"], services["target-worker-2"]
    assert {key for key in second if second.get(key) != first.get(key)} == {"profiles", "networks", "deploy"}
    assert first.keys() <= second.keys()


def test_only_coordinators_are_published_after_their_workers() -> None:
    services = read()
    for suffix in ("", "-cpu"):
        coordinator = services[f"coordinator{suffix}"]
        assert coordinator["depends_on"] == {
            f"target-worker{suffix}": {"condition": "service_healthy"},
            f"draft-worker{suffix}": {"condition": "service_healthy"},
        }
        assert coordinator["ports"] == ["127.0.0.1:50151:50151", "127.0.0.1:8000:8000"]
        assert options(coordinator)["http-port"] == "8000"
    assert {name for name in services if "ports" in services[name]} == {*COORDINATORS, *MONITORING}


def test_a_stopped_service_has_time_to_drain() -> None:
    needed = dict.fromkeys(COORDINATORS, CoordinatorConfig(targets=("t:1",), tokenizer="t").drain_timeout)
    needed |= dict.fromkeys(WORKERS, WorkerConfig(model="m").handover_timeout)
    services = read()
    for name, seconds in needed.items():
        grace = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace >= seconds + 3 * FAREWELL_SECONDS
    longer = read({"PACELINE_DRAIN_TIMEOUT": "60", "PACELINE_STOP_GRACE_PERIOD": "70s"})
    for name in COORDINATORS:
        assert options(longer[name])["drain-timeout"] == "60"
        assert longer[name]["stop_grace_period"] == "70s"


def test_each_role_checks_its_port_and_keeps_its_files() -> None:
    """The cache folder belongs to the process's user, and compiled code is kept there too.

    With a shared volume, a compromised draft could change the target's weights and code.
    """
    project = compose.read()
    for name in OURS:
        service = project.services[name]
        check = ["CMD", "paceline", "health", f"127.0.0.1:{options(service)['port']}"]
        assert service["healthcheck"]["test"] == check
        volume = f"{role_of(name).removesuffix('-worker')}-cache"
        assert mounts(service) == {"/home/paceline/.cache": volume}
        assert volume in project.volumes
    assert (
        "install -d -o paceline -g paceline /home/paceline/.cache" in (ROOT / "deploy/Dockerfile").read_text()
    )


# ---- the image ------------------------------------------------------------------------------------


def test_both_images_differ_only_in_their_torch() -> None:
    services = read()
    for name in COORDINATORS:
        build = services[name]["build"]
        assert (build["context"], build["dockerfile"]) == (".", "deploy/Dockerfile")
    index = [services[name]["build"]["args"]["TORCH_INDEX"] for name in COORDINATORS]
    assert index == ["https://pypi.org/simple", "https://download.pytorch.org/whl/cpu"]
    chosen = read({"PACELINE_TORCH_INDEX": "https://download.pytorch.org/whl/cu126"})
    assert chosen["coordinator"]["build"]["args"] == {"TORCH_INDEX": "https://download.pytorch.org/whl/cu126"}
    assert chosen["coordinator-cpu"] == services["coordinator-cpu"]


def test_each_image_is_built_once() -> None:
    """Services building one image side by side fail with `already exists`."""
    services = {name: service for name, service in read().items() if name not in MONITORING}
    builders = {name: service["image"] for name, service in services.items() if "build" in service}
    assert sorted(builders) == sorted(COORDINATORS)
    assert sorted(builders.values()) == sorted({service["image"] for service in services.values()})
    for name, service in services.items():
        # Else it would look for the image in a registry, before it is built.
        assert ("build" in service) is (service.get("pull_policy") != "never"), name


# ---- monitoring and load tests --------------------------------------------------------------------


def test_images_of_others_are_pinned() -> None:
    services = read()
    for name in MONITORING:
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", services[name]["image"])


def test_monitoring_keeps_its_data_and_its_port_private() -> None:
    project = compose.read()
    kept = {"prometheus": "/prometheus", "grafana": "/var/lib/grafana"}
    for name, place in kept.items():
        service = project.services[name]
        assert mounts(service)[place] == f"{name}-data"
        assert f"{name}-data" in project.volumes
        (port,) = service["ports"]
        assert port.startswith("127.0.0.1:")
    assert "--storage.tsdb.path=/prometheus" in project.services["prometheus"]["command"]
    moved = {"PACELINE_MONITORING_BIND": "10.0.0.7", "PACELINE_GRAFANA_PORT": "3001"}
    assert read(moved)["grafana"]["ports"] == ["10.0.0.7:3001:3000"]
    assert read({"PACELINE_BIND": "0.0.0.0"})["grafana"] == project.services["grafana"]


@pytest.mark.parametrize("files", FILES, ids=" ".join)
def test_files_that_are_mounted_exist(files: tuple[str, ...]) -> None:
    """Docker would make an empty folder in place of a missing file."""
    made = {"certificates", "keys"}
    for service in compose.read(*files).services.values():
        for source in mounts(service).values() if "volumes" in service else ():
            if source.startswith("./") and source.split("/")[1] not in made:
                assert (ROOT / source).exists(), source


def test_a_load_test_ends_and_waits_for_the_service() -> None:
    services = read()
    for name in LOAD_TESTS:
        service = services[name]
        assert service["restart"] == "no"
        assert service["entrypoint"] == ["paceline", "loadtest"]
        assert service["depends_on"] == {
            name.replace("loadtest", "coordinator"): {"condition": "service_healthy"}
        }


def test_every_container_is_confined() -> None:
    for name, service in read().items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


# ---- one GPU --------------------------------------------------------------------------------------


def one_gpu(environment: dict[str, str] | None = None) -> Service:
    services = compose.read(ONE_GPU, environment=environment).services
    assert services.keys() == {"paceline"}
    return services["paceline"]


def test_one_gpu_is_given_to_one_container_that_serves_both_models() -> None:
    service, coordinator = one_gpu(), read()["coordinator"]
    assert gpus(service) == ["0"]
    assert gpus(one_gpu({"PACELINE_GPU": "GPU-8f2"})) == ["GPU-8f2"]
    assert service["command"][0] == "serve"
    chosen, theirs = options(service), options(coordinator)
    assert chosen["device"] == "cuda", "both models'"
    for name in ("host", "port", "http-port", "num-speculative-tokens", "drain-timeout"):
        assert chosen[name] == theirs[name]
    for name in ("image", "init", "restart", "cap_drop", "security_opt", "ports", "healthcheck"):
        assert service[name] == coordinator[name]
    context = (ROOT / "deploy" / service["build"]["context"]).resolve()
    assert context == ROOT
    assert service["build"]["dockerfile"] == coordinator["build"]["dockerfile"]
    assert service["build"]["args"] == coordinator["build"]["args"]


def test_one_container_has_time_to_stop_all_processes() -> None:
    """As docs/operations.md says of systemd: twice the drain timeout and 20 seconds."""
    service = one_gpu()
    grace = float(service["stop_grace_period"].removesuffix("s"))
    assert grace >= 2 * float(options(service)["drain-timeout"]) + 20


# ---- certificates and keys ------------------------------------------------------------------------


def overlay() -> dict[str, Service]:
    return compose.read(SECURE).services


def test_every_service_has_only_its_own_key() -> None:
    services = overlay()
    assert services.keys() == read().keys() - {"grafana"}
    for name, service in services.items():
        assert all(volume.endswith(":ro") for volume in service["volumes"])
        places = mounts(service)
        role = role_of(name).removesuffix("-worker")
        keys = [
            source for source in places.values() if source.startswith("./certificates/") and "key" in source
        ]
        assert keys == ([f"./certificates/{role}.key"] if name in OURS else [])
        for value in service.get("environment", {}).values():
            if value.startswith("/"):
                assert value in places or str(Path(value).parent) in places


def test_a_secure_load_test_trusts_the_coordinator() -> None:
    services = compose.read(MAIN, SECURE, environment={"PACELINE_API_KEY": "pl-key"}).services
    for name in LOAD_TESTS:
        given: dict[str, Any] = services[name]["environment"]
        assert given["PACELINE_API_KEY"] == "pl-key"
        assert given["PACELINE_ADDRESS"] == "coordinator:50151"
        assert given["PACELINE_TLS_SERVER_NAME"] == "coordinator.paceline.internal"
        authority = services["coordinator"]["environment"]["PACELINE_WORKER_TLS_CA"]
        assert mounts(services[name])[given["PACELINE_TLS_CA"]] == mounts(services["coordinator"])[authority]


@pytest.mark.parametrize("name", OURS)
def test_the_overlays_variables_are_valid_settings(name: str) -> None:
    environment = overlay()[name]["environment"]
    values = {key.removeprefix("PACELINE_").lower(): value for key, value in environment.items()}
    if name in COORDINATORS:
        config = CoordinatorConfig(targets=("t:1",), tokenizer="t", **values)
        assert (config.tls is not None, config.worker_tls is not None) == (True, True)
    else:
        assert WorkerConfig(model="m", **values).tls is not None
