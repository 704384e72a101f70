"""The compose files without a container engine: commands of services as processes, wired as the files say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import compose
from harness.compose import ONE_GPU, Project, Service, options
from harness.pair import Pair
from harness.web import connect

from paceline.cli import main
from paceline.client import Client, SamplingParams, WorkerState
from paceline.supervisor import ChildSpec, Supervisor, discard

START_TIMEOUT = 280.0
TOYS = Path(__file__).parent / "seams/toys"
REPLICAS = {"target-worker-cpu": 2, "draft-worker-cpu": 2}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PACELINE_"):
            monkeypatch.delenv(name)


def paceline(*words: str) -> None:
    """One command in this process, which must succeed."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code


def test_one_container_serves_as_the_file_says(tiny_pair: Pair) -> None:
    """Its command line as a local process, on the CPU."""
    models = {"PACELINE_TARGET_MODEL": str(tiny_pair.target), "PACELINE_DRAFT_MODEL": str(tiny_pair.draft)}
    replaced = {"host": "127.0.0.1", "http-port": "0", "device": "cpu"}
    service = compose.read(ONE_GPU, environment=models).services["paceline"]
    words = [f"--{n}={replaced.get(n, v)}" for n, v in options(service).items() if n != "port"]
    served = [sys.executable, "-P", "-m", "paceline", service["command"][0], *words]
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


def in_order(project: Project, names: set[str]) -> list[str]:
    """Each service after those it depends on."""
    ordered: list[str] = []
    while len(ordered) < len(names):
        ready = [name for name in names.difference(ordered) if project.dependencies(name) <= set(ordered)]
        assert ready, "services depend on each other"
        ordered += sorted(ready)
    return ordered


def local_command(service: Service, host: str, ports: dict[str, str]) -> list[str]:
    """A service's command with free ports on another address; the supervisor adds the port itself."""
    words = [
        re.sub("^(--http-port|--metrics-port)=.*", r"\1=0", word.replace("0.0.0.0", host))
        for word in service["command"]
        if not word.startswith("--port=")
    ]
    for there, here in ports.items():
        words = [re.sub(rf"(?<=:){there}$", here, word) for word in words]
    return words


def test_services_work_together_as_the_file_connects_them(
    tiny_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up --scale target-worker-cpu=2 --scale draft-worker-cpu=2`, and a load test.

    Only ports and addresses are local ones: a service's containers listen on one port of different addresses,
    and a resolver of the test knows the addresses of a name.
    """
    chosen = {
        "PACELINE_TARGET_MODEL": str(tiny_pair.target),
        "PACELINE_DRAFT_MODEL": str(tiny_pair.draft),
        "PACELINE_TARGET_THREADS": "1",
        "PACELINE_NUM_SPECULATIVE_TOKENS": "2",
    }
    project = compose.read(environment=chosen)
    hosts = tmp_path / "hosts"
    hosts.touch()
    monkeypatch.setenv("PACELINE_TEST_HOSTS", str(hosts))
    program = (sys.executable, "-P", str(TOYS), "host_names")
    ports: dict[str, str] = {}  # as the file says it -> as it is here
    workers = set[str]()

    with Supervisor(sink=discard) as supervisor:
        for name in in_order(project, project.started("coordinator-cpu")):
            service = project.services[name]
            there = options(service)["port"]
            for replica in range(REPLICAS.get(name, 1)):
                host = f"127.0.0.{1 + replica}"
                command = (*program, *local_command(service, host, ports))
                child = ChildSpec(role=f"{name}-{replica}", command=command, port=int(ports.get(there, 0)))
                (status,) = supervisor.start([child], START_TIMEOUT)
                _, _, ports[there] = status.address.rpartition(":")
                with hosts.open("a") as file:
                    file.writelines(f"{host} {each}\n" for each in project.names_of(name))
                if name in REPLICAS:
                    workers.add(status.address)

                check = [
                    status.address if word.endswith(there) else word
                    for word in service["healthcheck"]["test"]
                ]
                assert check[:2] == ["CMD", "paceline"]
                paceline(*check[2:])
                assert capsys.readouterr().out == "SERVING\n"

        load_test = project.services["loadtest-cpu"]
        for variable, value in load_test["environment"].items():
            monkeypatch.setenv(variable, value.replace("coordinator:50151", status.address))
        paceline(*load_test["entrypoint"][1:], *load_test["command"], "--requests=8", "--max-tokens=16")

        with Client(status.address) as client:
            sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            result = client.generate("def main():", sampling, speculation={"prompt_lookup": False})
            found = client.status()
        (http,) = connect(found.coordinator.http_address)
        served = {w: http.total("paceline:prefix_cache_queries_total", f'worker="{w}"') for w in workers}
    assert len(result.token_ids) == 12
    assert result.speculative_decoding.num_draft_tokens > 0
    assert {worker.address for worker in found.workers} == workers
    assert len(workers) == 4
    for worker in found.workers:
        assert worker.state is WorkerState.READY
        assert worker.info is not None
        assert worker.info.model == str(getattr(tiny_pair, worker.role))
        assert served[worker.address] > 0, "every worker has had sequences"
