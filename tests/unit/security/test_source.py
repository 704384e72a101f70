"""Forbidden calls in the source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.refusals import refused
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.core.config import DraftConfig, WorkerConfig
from paceline.engine.loading import build
from paceline.engine.loading import model as loading
from paceline.supervisor import StackConfig

ROOT = Path(__file__).parents[3]
PACKAGES = ("paceline", "coordinator", "draft_worker", "target_worker", "tools")
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"}
OWN_CHECKPOINTS = "paceline/assets/training/"
"""The trainer of the embedded pair reads what it wrote itself, as tensors only."""


def findings(source: str, path: str) -> Iterator[str]:
    """Whatever may run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            if {module.split(".")[0] for module in modules} & UNSAFE_MODULES:
                yield f"{path}:{node.lineno} imports {modules}"
        elif isinstance(node, ast.Call):
            name, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            tensors_only = path.startswith(OWN_CHECKPOINTS) and options.get("weights_only") == "True"
            if (
                name in UNSAFE_CALLS
                or (name == "torch.load" and not tensors_only)
                or options.get("allow_pickle", "False") != "False"
                or options.get("shell", "False") != "False"
            ):
                yield f"{path}:{node.lineno} calls {name}"


def test_product_code_runs_no_read_data() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert [each for f in files for each in findings(f.read_text(), str(f.relative_to(ROOT)))] == []


@pytest.mark.planted
@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill.source",
        "yaml.load(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=True)",
        "numpy.load(file, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "eval(text)",
    ],
)
def test_planted_unsafe_calls_are_found(planted: str) -> None:
    assert list(findings(planted, "paceline/rpc/x.py"))


# ---- code and pickles of models -------------------------------------------------------------------


def test_a_models_code_is_trusted_only_on_request() -> None:
    for cls in (WorkerConfig, StackConfig):
        (field,) = (f for f in fields(cls) if f.name == "trust_remote_code")
        assert field.default is False
    assert inspect.signature(loading.load_model).parameters["trust_remote_code"].default is False


class SeenError(BaseException):
    """Ends the loading once all is known."""


@pytest.mark.parametrize("trusted", [False, True])
def test_the_trust_setting_reaches_transformers(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def load_config(_name: str, **options: Any) -> Any:
        seen.append(options)
        return real

    def load_model(_name: str, **options: Any) -> Any:
        seen.append(options)
        raise SeenError

    config = DraftConfig(model="embedded:draft", **({"trust_remote_code": True} if trusted else {}))
    real = AutoConfig.from_pretrained(ROOT / "paceline/assets/draft")
    monkeypatch.setattr(loading, "AutoConfig", SimpleNamespace(from_pretrained=load_config))
    monkeypatch.setattr(loading, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=load_model))
    with pytest.raises(SeenError):
        build.build(config)
    assert [options["trust_remote_code"] for options in seen] == [trusted, trusted]
    assert seen[1]["use_safetensors"] is True


def test_a_model_of_pickled_weights_is_refused(tmp_path: Path) -> None:
    import torch

    draft = ROOT / "paceline/assets/draft"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((draft / name).read_bytes())
    model = AutoModelForCausalLM.from_pretrained(draft)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with refused("model"):
        loading.load_model(tmp_path)
