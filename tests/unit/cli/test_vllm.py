"""Options of `vllm serve` given to `paceline serve`."""

from __future__ import annotations

import json

import pytest
import typer

from paceline.cli import vllm
from paceline.cli.app import app
from paceline.core.errors import InvalidArgumentError

_COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SERVE = {name for p in _COMMANDS["serve"].params for name in (*p.opts, *p.secondary_opts)}


def translated(*words: str) -> list[str]:
    return vllm.translated(words, SERVE)


@pytest.mark.parametrize("ours", sorted(set(vllm.SAME_MEANING.values())))
def test_every_vllm_alias_maps_to_an_option(ours: str) -> None:
    assert ours.partition("=")[0] in SERVE


def test_no_vllm_alias_hides_an_option() -> None:
    theirs = {*vllm.SAME_MEANING, *vllm.SO_ANYWAY, *vllm.NOT_HERE}
    assert theirs & SERVE == set()


def test_vllm_options_keep_their_values() -> None:
    words = ("m/x", "--max-num-seqs", "8", "--served-model-name=y", "--enforce-eager", "--port", "1")
    expected = ["m/x", "--max-running", "8", "--model-name=y", "--no-cuda-graphs", "--port", "1"]
    assert translated(*words) == expected


def test_underscores_are_accepted_as_hyphens() -> None:
    assert translated("--max_num_seqs=8") == ["--max-running=8"]
    words = ("--max_model_len", "9", "--gpu_memory_utilization=0.5", "--trust_remote_code", "m/a_b")
    expected = ["--max-model-len", "9", "--gpu-memory-utilization=0.5", "--trust-remote-code", "m/a_b"]
    assert translated(*words) == expected


@pytest.mark.parametrize("dtype", ["--dtype=half", "--dtype half"])
def test_vllm_dtype_names_are_accepted(dtype: str) -> None:
    assert translated(*dtype.split()) == ["--dtype", "float16"]


def test_vllm_options_without_effect_are_dropped() -> None:
    words = ("--disable-log-requests", "--tensor-parallel-size", "1", "-tp=1", "--load-format", "auto")
    assert translated(*words, "m/x") == ["m/x"]


@pytest.mark.parametrize(
    ("words", "field", "said"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size", "single device"),
        (("-tp", "2"), "-tp", "single device"),
        (("--kv-cache-dtype", "fp8"), "--kv-cache-dtype", "the model's number format"),
        (("--quantization", "awq"), "--quantization", "served unchanged"),
        (("--api-key", "abc"), "--api-key", "paceline keys add"),
        (("--revision", "v1"), "--revision", "hf download"),
        (("--tensor-parallel-size",), "--tensor-parallel-size", "requires an argument"),
        (("--speculative-config", "{"), "--speculative-config", "must be JSON"),
        (("--speculative-config", '{"method": "eagle"}'), "--speculative-config", "method 'eagle'"),
    ],
)
def test_unsupported_vllm_options_are_refused_with_a_reason(
    words: tuple[str, ...], field: str, said: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as refused:
        translated(*words)
    assert refused.value.field == field


def test_a_speculative_config_becomes_our_options() -> None:
    config = '{"method": "draft_model", "model": "m/d", "num_speculative_tokens": 5}'
    expected = ["--draft-model", "m/d", "--num-speculative-tokens", "5"]
    assert translated("--speculative-config", config) == expected
    ngram = '--speculative-config={"method": "ngram", "prompt_lookup_max": 4}'
    without_draft = ["--draft-model", "none", "--sources"]
    assert translated(ngram) == [*without_draft, "prompt-lookup", "--prompt-lookup-max", "4"]
    suffix = '--speculative-config={"method": "suffix", "suffix_decoding_max_tree_depth": 32}'
    assert translated(suffix) == [*without_draft, "suffix", "--suffix-max-tree-depth", "32"]


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        ("[(0,), (0, 0), (0, 0, 0)]", ["--num-speculative-tokens", "3"]),
        (
            "[(0,), (1,), (2,), (0, 0), (0, 1)]",
            ["--num-speculative-tokens", "2", "--tree-width", "3", "--max-tree-nodes", "5"],
        ),
    ],
)
def test_a_token_tree_becomes_bounds(tree: str, options: list[str]) -> None:
    config = {"model": "m/d", "num_speculative_tokens": 5, "speculative_token_tree": tree}
    assert translated("-sc", json.dumps(config)) == [*options, "--draft-model", "m/d"]


@pytest.mark.parametrize(
    "tree",
    [
        "",
        "[",
        "[]",
        "[()]",
        "(1)",
        "[(0,), 'x']",
        "[(-1,)]",
        "__import__('os')",
        "[(1e999,)]",
        "[(0.5,)]",
        "['01']",
        5,
        None,
    ],
)
def test_a_malformed_token_tree_is_refused_by_name(tree: object) -> None:
    with pytest.raises(InvalidArgumentError, match="speculative_token_tree") as refused:
        translated("--speculative-config", json.dumps({"speculative_token_tree": tree}))
    assert refused.value.field == "--speculative-config"


def test_an_unknown_option_is_left_to_the_parser() -> None:
    assert translated("--wrong", "x", "--", "--revision") == ["--wrong", "x", "--", "--revision"]
