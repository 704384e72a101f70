"""Names of models are checked without loading a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import assets
from paceline.assets.checkpoints import check_model, check_tokenizer, weight_bytes
from paceline.core.errors import InvalidArgumentError

PARTS = ("config.json", "model.safetensors", "tokenizer.json")


def folder(path: Path, *names: str) -> str:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return str(path)


def refusal(name: str, check: object = check_model) -> str:
    with pytest.raises(InvalidArgumentError) as refused:
        check("draft_model", name)  # type: ignore[operator]
    assert refused.value.field == "draft_model"
    return refused.value.description


@pytest.mark.parametrize("name", ["embedded:target", "gpt2", "meta-llama/Llama-3.2-1B"])
def test_possible_model_names_pass(name: str) -> None:
    check_model("model", name)
    check_tokenizer("tokenizer", name)


def test_a_complete_folder_passes(tmp_path: Path) -> None:
    name = folder(tmp_path / "m", *PARTS)
    check_model("model", name)
    check_tokenizer("tokenizer", name)
    check_tokenizer("tokenizer", f"{name}/tokenizer.json")


def test_an_unknown_embedded_model_lists_the_known() -> None:
    assert "embedded:target and embedded:draft" in refusal("embedded:foo")


@pytest.mark.parametrize("name", ["./chatmodel", "../x", "/no/such/model", "models/mine/v1", "a\\b"])
def test_a_missing_path_is_reported_as_a_path(name: str) -> None:
    assert "no such folder" in refusal(name)
    assert "no such file or folder" in refusal(name, check_tokenizer)


def test_the_existing_part_of_a_path_is_named(tmp_path: Path) -> None:
    assert refusal(f"{tmp_path}/lama/x").endswith(f"the path exists up to {tmp_path}")


def test_an_unexpanded_home_is_reported() -> None:
    assert f"use {Path('~/m').expanduser()}" in refusal("~/m")


def test_a_name_neither_path_nor_hub_id_is_refused() -> None:
    assert "nor a hub id (owner/name)" in refusal("my model")


def test_a_file_is_refused_as_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file; a model is a folder" in refusal(str(file))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "has no config.json"),
        (("adapter_config.json",), "is an adapter"),
        (("model.gguf",), "GGUF"),
        (("config.json", "tokenizer.json"), "has no weights"),
        (("config.json", "pytorch_model.bin"), "pickled weights, which are never loaded"),
        (("config.json", "model.safetensors"), "has no tokenizer"),
    ],
)
def test_a_folder_lacking_files_names_them(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in refusal(folder(tmp_path / "m", *names))


def test_a_coordinator_needs_tokenizer_json(tmp_path: Path) -> None:
    name = folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.model")
    check_model("model", name)
    assert "has no tokenizer.json" in refusal(name, check_tokenizer)


def test_the_size_of_weights_is_their_files(tmp_path: Path) -> None:
    name = folder(tmp_path / "m", "config.json")
    assert weight_bytes(name) is None
    for file, size in (("model-1.safetensors", 5), ("model-2.safetensors", 6), ("other.bin", 7)):
        (tmp_path / "m" / file).write_bytes(bytes(size))
    assert weight_bytes(name) == 11
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": 10}}')
    assert weight_bytes(name) == 10, "what the index lists"
    for broken in ("{}", "[]", "no JSON", '{"metadata": {"total_size": "x"}}'):
        index.write_text(broken)
        assert weight_bytes(name) == 11
    (tmp_path / "m" / "model.safetensors").write_bytes(bytes(9))
    assert weight_bytes(name) == 9, "others are copies in other forms"


def test_the_size_of_embedded_weights_is_known() -> None:
    size = (assets.path("target") / "model.safetensors").stat().st_size
    assert weight_bytes("embedded:target") == size
    assert weight_bytes("embedded:target@3") == 3 * size


def test_the_size_of_a_fetched_model_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the hub's library keeps it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert weight_bytes("owner/name") is None
    kept = tmp_path / "models--owner--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots").mkdir()
    folder(kept / "snapshots" / "abc", "config.json")
    assert weight_bytes("owner/name") is None, "its weights are not there yet"
    (kept / "snapshots" / "abc" / "model.safetensors").write_bytes(bytes(12))
    assert weight_bytes("owner/name") == 12
    assert weight_bytes("owner/other") is None
    assert weight_bytes("not/a/hub/id") is None
