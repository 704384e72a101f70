"""Weights come from the checkpoint's safetensors files only, whatever index and configuration name."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.refusals import refused as field_refused
from transformers import AutoModelForCausalLM

from paceline.core.errors import InvalidArgumentError
from paceline.engine.loading import checkpoint, model

DRAFT = Path(__file__).parents[3] / "paceline/assets/draft"
INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    """The embedded draft with an index and one shard, as its files would be if it were larger."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in DRAFT.iterdir():
        shutil.copy(file, folder / file.name)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    name_shard(folder, "part.safetensors")
    return folder


def name_shard(folder: Path, shard: Any, index: str = INDEX) -> None:
    names = AutoModelForCausalLM.from_pretrained(DRAFT).state_dict().keys()
    content = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
    (folder / index).write_text(json.dumps(content))


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path | str) -> str:
    with field_refused("model") as failure:
        model.load_model(folder)
    return failure.value.description


def pickled(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(AutoModelForCausalLM.from_pretrained(DRAFT).state_dict(), file)


def test_shards_beside_the_index_load(tmp_path: Path) -> None:
    assert model.load_model(sharded(tmp_path)).vocab_size > 0


def test_a_pickle_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    pickled(tmp_path / "outside/weights.bin")
    name_shard(folder, "../outside/weights.bin")
    told = refused(folder)
    assert INDEX in told
    assert "../outside/weights.bin" in told


def test_a_pickle_beside_the_index_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    pickled(folder / "part.bin")
    name_shard(folder, "part.bin")
    assert "part.bin" in refused(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../outside/part.safetensors",
        "sub/part.safetensors",
        "..\\part.safetensors",
        "/part.safetensors",
        "",
        7,
        ["part.safetensors"],
    ],
)
def test_a_shard_without_a_plain_name_is_refused(tmp_path: Path, shard: Any) -> None:
    folder = sharded(tmp_path / "model")
    (tmp_path / "outside").mkdir()
    (folder / "sub").mkdir()
    for place in (tmp_path / "outside", folder / "sub"):
        shutil.copy(DRAFT / "model.safetensors", place / "part.safetensors")
    name_shard(folder, shard)
    assert INDEX in refused(folder)


def test_a_variants_index_is_checked(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    name_shard(folder, "../weights.bin", "model.fp16.safetensors.index.json")
    assert "model.fp16" in refused(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_invalid_index_is_refused(tmp_path: Path, content: str) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(content)
    assert INDEX in refused(folder)


def test_an_index_of_pickles_is_not_read(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    name_shard(folder, "pytorch_model.bin", "pytorch_model.bin.index.json")
    assert model.load_model(folder).vocab_size > 0


@pytest.mark.parametrize("name", ["adapter_model.bin", "../part.safetensors", "weights.bin", 7])
def test_weights_named_by_the_config_are_checked(tmp_path: Path, name: Any) -> None:
    folder = sharded(tmp_path / "model")
    pickled(folder / "adapter_model.bin")
    change_config(folder, transformers_weights=name)
    assert "transformers_weights" in refused(folder)


def test_an_index_named_by_the_config_is_checked(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    pickled(tmp_path / "weights.bin")
    name_shard(folder, "../weights.bin", "other.safetensors.index.json")
    change_config(folder, transformers_weights="other.safetensors.index.json")
    assert "other.safetensors.index.json" in refused(folder)


def test_links_into_a_hub_caches_store_load(tmp_path: Path) -> None:
    plain = sharded(tmp_path / "plain")
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(plain.iterdir()):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    assert model.load_model(snapshot).vocab_size > 0


@pytest.mark.parametrize("shard", ["part.safetensors", "model.safetensors"])
def test_a_link_to_another_format_is_refused(tmp_path: Path, shard: str) -> None:
    folder = sharded(tmp_path / "model")
    pickled(tmp_path / "weights.bin")
    (folder / shard).unlink(missing_ok=True)
    (folder / shard).symlink_to(tmp_path / "weights.bin")
    assert "is a link to" in refused(folder)


def test_an_index_on_the_hub_is_checked_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_shard(tmp_path, "../weights.bin")

    def cached(name: str, file: str, **_: Any) -> str | None:
        assert name == "somebody/model"
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr(checkpoint, "cached_file", cached)
    with pytest.raises(InvalidArgumentError, match=r"weights\.bin"):
        checkpoint.check_weights("somebody/model", SimpleNamespace())


def test_adapters_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in refused(folder)


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "model.pt", "config.json"])
def test_a_single_file_model_is_refused(tmp_path: Path, name: str) -> None:
    shutil.copy(DRAFT / "config.json", tmp_path / name)
    assert "is a file" in refused(tmp_path / name)


def test_a_kernel_named_by_the_config_is_not_loaded(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    change_config(folder, attn_implementation="somebody/kernel")
    assert model.load_model(folder).model.config._attn_implementation == "paceline"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_models_code_is_not_run(tmp_path: Path, file: str) -> None:
    folder = sharded(tmp_path / "model")
    ran = tmp_path / "ran"
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    config = json.loads((folder / file).read_text())
    classes = {
        "AutoConfig": "theirs.Config",
        "AutoModelForCausalLM": "theirs.Model",
        "AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"],
    }
    config |= {"auto_map": classes, "model_type": "theirs", "tokenizer_class": "Theirs"}
    (folder / file).write_text(json.dumps(config))
    with contextlib.suppress(InvalidArgumentError):
        model.load_model(folder)
    assert not ran.exists()
