"""The compose files without a container engine: their structure, and their command lines as processes.

What this cannot show: that the image builds, and that the NVIDIA runtime hands each worker its GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.pair import Pair

from paceline.cli import main
from paceline.client import Client, SamplingParams, WorkerState
from paceline.core.config import CoordinatorConfig
from paceline.rpc.server.server import FAREWELL_SECONDS
from paceline.supervisor import ChildSpec, Supervisor, discard

ROOT = Path(__file__).parents[2]
ROLES = ("coordinator", "target-worker", "draft-worker")
START_TIMEOUT = 280.0

Service = dict[str, Any]


def interpolate(text: str, environment: dict[str, str]) -> str:
    """`${NAME:-default}` as docker compose replaces it."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: environment.get(m[1]) or m[2], text)


def read_services(
    environment: dict[str, str] | None = None, file: str = "docker-compose.yml"
) -> dict[str, Service]:
    text = interpolate((ROOT / file).read_text(), environment or {})
    assert "${" not in text
    services: dict[str, Service] = yaml.safe_load(text)["services"]
    return services


def gpus(service: Service) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    ids: list[str] = device["device_ids"]
    return ids


def settings(service: Service) -> dict[str, str]:
    """The `--name=value` options of a service's command."""
    return dict(word.removeprefix("--").split("=", 1) for word in service["command"][1:])


def names(services: dict[str, Service], service: str) -> list[str]:
    """What the others reach a service by."""
    aliases: list[str] = services[service].get("networks", {}).get("default", {}).get("aliases", [])
    return [service, *aliases]


def test_compose_has_three_services_each_with_a_cpu_variant() -> None:
    services = read_services()
    assert set(services) == {*ROLES, *(f"{role}-cpu" for role in ROLES)}
    for role in ROLES:
        assert "profiles" not in services[role]
        assert services[f"{role}-cpu"]["profiles"] == ["cpu"]


def test_draft_and_target_reserve_separate_gpus() -> None:
    services = read_services()
    assert gpus(services["draft-worker"]) == ["0"]
    assert gpus(services["target-worker"]) == ["1"]
    chosen = read_services({"PACELINE_DRAFT_GPU": "3", "PACELINE_TARGET_GPU": "GPU-8f2"})
    assert gpus(chosen["draft-worker"]) == ["3"]
    assert gpus(chosen["target-worker"]) == ["GPU-8f2"]
    for name, service in services.items():
        if name not in ("draft-worker", "target-worker"):
            assert "deploy" not in service


def test_only_the_gpu_workers_use_cuda() -> None:
    services = read_services()
    for role in ("target-worker", "draft-worker"):
        gpu, cpu = settings(services[role]), settings(services[f"{role}-cpu"])
        assert (gpu.pop("device"), cpu.pop("device")) == ("cuda", "cpu")
        cpu.pop("threads")
        assert gpu == cpu


def test_both_images_differ_only_in_their_torch() -> None:
    services = read_services()
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    for name, service in services.items():
        assert service["image"] == ("paceline:cpu" if name.endswith("-cpu") else "paceline:cuda")
        assert service["init"] is True
    for suffix in ("", "-cpu"):
        build = services[f"coordinator{suffix}"]["build"]
        assert (build["context"], build["dockerfile"]) == (".", "deploy/Dockerfile")
    index = {name: services[f"coordinator{name}"]["build"]["args"]["TORCH_INDEX"] for name in ("", "-cpu")}
    assert index == {"": "https://pypi.org/simple", "-cpu": "https://download.pytorch.org/whl/cpu"}
    chosen = read_services({"PACELINE_TORCH_INDEX": "https://download.pytorch.org/whl/cu126"})
    assert chosen["coordinator"]["build"]["args"] == {"TORCH_INDEX": "https://download.pytorch.org/whl/cu126"}
    assert chosen["coordinator-cpu"] == services["coordinator-cpu"]
    assert "ARG TORCH_INDEX=" in dockerfile
    assert "\nUSER paceline\n" in dockerfile
    assert "HEALTHCHECK" not in dockerfile
    assert 'ENTRYPOINT ["paceline"]' in dockerfile


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
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    last = dockerfile.rpartition("\nFROM ")[2]
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


def test_each_image_is_built_once() -> None:
    """Services building one image side by side fail with `already exists`."""
    services = read_services()
    builders = {name: service["image"] for name, service in services.items() if "build" in service}
    assert sorted(builders.values()) == sorted({service["image"] for service in services.values()})
    for name, image in builders.items():
        # compose builds for the services that it starts: one that is named, with all that it depends on.
        alike = {other for other, service in services.items() if service["image"] == image}
        assert alike == {name, *services[name]["depends_on"]}
        # Else it would look for the image in a registry, before it is built.
        for worker in services[name]["depends_on"]:
            assert services[worker]["pull_policy"] == "never"


def test_dockerignore_allows_exactly_the_copied_files() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
        for source in line.split()
    }
    assert copied == allowed


def test_only_the_coordinator_is_published_after_its_workers() -> None:
    services = read_services()
    for suffix in ("", "-cpu"):
        coordinator = services[f"coordinator{suffix}"]
        assert coordinator["depends_on"] == {
            f"target-worker{suffix}": {"condition": "service_healthy"},
            f"draft-worker{suffix}": {"condition": "service_healthy"},
        }
        assert coordinator["ports"] == ["127.0.0.1:50151:50151", "127.0.0.1:8000:8000"]
        assert settings(coordinator)["http-port"] == "8000"
        for role in ("target-worker", "draft-worker"):
            assert "ports" not in services[role + suffix]


def test_services_have_the_names_the_coordinator_uses() -> None:
    services = read_services()
    for suffix in ("", "-cpu"):
        wanted = settings(services[f"coordinator{suffix}"])
        for option in ("target", "draft"):
            host, port = wanted[option].split(":")
            worker = services[f"{option}-worker{suffix}"]
            assert host in names(services, f"{option}-worker{suffix}")
            assert settings(worker)["port"] == port
            assert settings(worker)["host"] == "0.0.0.0"


def test_prometheus_scrapes_every_process() -> None:
    services = read_services()
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    scraped = {target for job in jobs for each in job["static_configs"] for target in each["targets"]}
    for suffix in ("", "-cpu"):
        there = set()
        for role in ROLES:
            options = settings(services[role + suffix])
            port = options["http-port" if role == "coordinator" else "metrics-port"]
            found = scraped & {f"{name}:{port}" for name in names(services, role + suffix)}
            assert len(found) == 1, role
            there |= found
        assert scraped == there


def test_a_stopped_service_has_time_to_drain() -> None:
    drain = CoordinatorConfig(targets=("t:1",), tokenizer="t").drain_timeout
    for service in read_services().values():
        assert float(service["stop_grace_period"].removesuffix("s")) >= drain + 3 * FAREWELL_SECONDS
    longer = read_services({"PACELINE_DRAIN_TIMEOUT": "60", "PACELINE_STOP_GRACE_PERIOD": "70s"})
    for suffix in ("", "-cpu"):
        coordinator = longer[f"coordinator{suffix}"]
        assert settings(coordinator)["drain-timeout"] == "60"
        assert coordinator["stop_grace_period"] == "70s"


def test_services_check_their_port_and_keep_the_hub_cache() -> None:
    compose = yaml.safe_load(interpolate((ROOT / "docker-compose.yml").read_text(), {}))
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    for service in compose["services"].values():
        assert service["healthcheck"]["test"] == [
            *("CMD", "paceline", "health"),
            f"127.0.0.1:{settings(service)['port']}",
        ]
        (volume,) = service["volumes"]
        name, folder = volume.split(":")
        assert name in compose["volumes"]
        assert f"install -d -o paceline -g paceline {folder}" in dockerfile


def test_each_role_keeps_its_files_in_its_own_volume() -> None:
    """The cache folder belongs to the process's user: compiled code is kept there too.

    With a shared volume, a compromised draft could change the target's weights and code.
    """
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    (folder,) = re.findall(r"install -d -o paceline -g paceline (\S+)", dockerfile)
    assert folder == "/home/paceline/.cache"
    for name, service in read_services().items():
        role = name.removesuffix("-cpu").removesuffix("-worker")
        assert service["volumes"] == [f"{role}-cache:{folder}"]


def one_gpu(environment: dict[str, str] | None = None) -> Service:
    services = read_services(environment, "deploy/one-gpu.yml")
    assert services.keys() == {"paceline"}
    return services["paceline"]


def test_one_gpu_is_given_to_one_container_that_serves_both_models() -> None:
    service, coordinator = one_gpu(), read_services()["coordinator"]
    assert gpus(service) == ["0"]
    assert gpus(one_gpu({"PACELINE_GPU": "GPU-8f2"})) == ["GPU-8f2"]
    assert service["command"][0] == "serve"
    chosen, theirs = settings(service), settings(coordinator)
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
    assert (
        float(service["stop_grace_period"].removesuffix("s"))
        >= 2 * float(settings(service)["drain-timeout"]) + 20
    )


def test_one_container_serves_as_the_file_says(
    tiny_pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command line as a local process, on the CPU."""
    for name in os.environ:
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)
    models = {"PACELINE_TARGET_MODEL": str(tiny_pair.target), "PACELINE_DRAFT_MODEL": str(tiny_pair.draft)}
    replaced = {"host": "127.0.0.1", "http-port": "0", "device": "cpu"}
    command, *options = one_gpu(models)["command"]
    words = [f"--{n}={replaced.get(n, v)}" for n, v in settings({"command": [command, *options]}).items()]
    words = [word for word in words if not word.startswith("--port=")]
    served = [sys.executable, "-P", "-m", "paceline", command, *words]
    with subprocess.Popen([*served, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(line.split()[-1] for line in process.stdout if line.startswith("Paceline listens"))
            with Client(address) as client:
                sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
                result = client.generate("def main():", sampling)
                workers = {worker.role: worker for worker in client.status().workers}
        finally:
            process.terminate()
            process.communicate(timeout=START_TIMEOUT)
    assert len(result.token_ids) == 8
    for role, worker in workers.items():
        assert worker.state == WorkerState.READY
        assert worker.info is not None
        assert (worker.info.model, worker.info.device) == (str(getattr(tiny_pair, role)), "cpu")


def in_order(services: dict[str, Service]) -> list[str]:
    """Each service after those it depends on."""
    ordered: list[str] = []
    while len(ordered) < len(services):
        ready = [
            name
            for name, service in services.items()
            if name not in ordered and set(service.get("depends_on", {})) <= set(ordered)
        ]
        assert ready, "services depend on each other"
        ordered += ready
    return ordered


def test_services_work_together_as_the_file_connects_them(
    tiny_pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each service's command line as a local process: only names and ports become local ones."""
    for name in os.environ:
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)
    chosen = {
        "PACELINE_TARGET_MODEL": str(tiny_pair.target),
        "PACELINE_DRAFT_MODEL": str(tiny_pair.draft),
        "PACELINE_TARGET_THREADS": "1",
        "PACELINE_NUM_SPECULATIVE_TOKENS": "2",
    }
    services = {name: s for name, s in read_services(chosen).items() if name.endswith("-cpu")}
    where: dict[str, str] = {}  # as the file says it -> as it is here

    with Supervisor(sink=discard) as supervisor:
        for name in in_order(services):
            service = services[name]
            role = name.removesuffix("-cpu")
            port = settings(service)["port"]
            words = [
                re.sub("^(--http-port|--metrics-port)=.*", r"\1=0", word.replace("0.0.0.0", "127.0.0.1"))
                for word in service["command"]
                if not word.startswith("--port=")  # the supervisor adds --port 0
            ]
            for there, here in where.items():
                words = [word.replace(there, here) for word in words]
            child = ChildSpec(role=role, command=(sys.executable, "-P", "-m", "paceline", *words))
            (status,) = supervisor.start([child], START_TIMEOUT)
            where[f"{role}:{port}"] = where[f"127.0.0.1:{port}"] = status.address

            check = [where.get(word, word) for word in service["healthcheck"]["test"]]
            assert check[:2] == ["CMD", "paceline"]
            with pytest.raises(SystemExit) as end:
                main(check[2:])
            assert not end.value.code
            assert capsys.readouterr().out == "SERVING\n"

        with Client(where["coordinator:50151"]) as client:
            sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            result = client.generate("def main():", sampling, speculation={"prompt_lookup": False})
            workers = {worker.role: worker for worker in client.status().workers}
    assert len(result.token_ids) == 12
    assert result.speculative_decoding.num_draft_tokens > 0
    assert {role: worker.state for role, worker in workers.items()} == {
        "target": WorkerState.READY,
        "draft": WorkerState.READY,
    }
    for role, worker in workers.items():
        assert worker.info.model == str(getattr(tiny_pair, role))
