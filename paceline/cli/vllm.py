"""Options of `vllm serve` that `paceline serve` accepts or refuses.

Options with an equivalent are translated. Options without one are refused with a reason, unless they request
Paceline's normal behaviour.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from paceline.core.errors import InvalidArgumentError

SAME_MEANING: Final = {
    "--model": "--target-model",
    "--served-model-name": "--model-name",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--num-gpu-blocks-override": "--num-blocks",
    "--enforce-eager": "--no-cuda-graphs",
    "--no-enforce-eager": "--cuda-graphs",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-ca",
    "--disable-log-stats": "--log-stats-seconds=0",
}
"""vLLM's options and their equivalents."""

SO_ANYWAY: Final = {
    "--disable-log-requests": None,
    "--no-enable-log-requests": None,
    "--enable-chunked-prefill": None,
    "--disable-uvicorn-access-log": None,
    "--tensor-parallel-size": "1",
    "-tp": "1",
    "--pipeline-parallel-size": "1",
    "-pp": "1",
    "--data-parallel-size": "1",
    "-dp": "1",
    "--kv-cache-dtype": "auto",
    "--load-format": ("auto", "safetensors"),
    "--tokenizer-mode": "auto",
    "--task": "generate",
    "--runner": ("auto", "generate"),
}
"""Options that request Paceline's normal behaviour, with the accepted values; None for flags."""

_ONE_DEVICE: Final = "a model runs on a single device, chosen by --target-device and --draft-device"
NOT_HERE: Final = {
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": "run one `paceline target-worker` per device, and give each with `--target`",
    "-dp": "run one `paceline target-worker` per device, and give each with `--target`",
    "--api-key": "keys are kept in a file: create one with `paceline keys add NAME --api-keys keys.json` and "
    "require it with `--api-keys keys.json`",
    "--revision": "the hub's main revision is used; for another one, run "
    "`hf download ID --revision REVISION --local-dir FOLDER` and give the folder",
    "--tokenizer": "the tokenizer is read from the target model's folder",
    "--kv-cache-dtype": "the cache has the model's number format: --target-dtype, --draft-dtype",
    "--load-format": "weights are read from safetensors only",
    "--quantization": "weights are served unchanged, and quantised checkpoints are not supported",
    "--tokenizer-mode": "the tokenizer is read from tokenizer.json",
    "--task": "only text generation is served",
    "--runner": "only text generation is served",
    "--seed": "each request has its own seed; the same seed gives the same tokens",
    "--swap-space": "nothing is swapped: preempted sequences are recomputed",
    "--cpu-offload-gb": "all weights are on the model's device",
    "--download-dir": "set the environment variable HF_HOME to the folder for downloads",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks (--max-batch-tokens)",
    "--enable-log-requests": "texts of requests are never logged; see docs/observability.md",
    "--enable-lora": "adapters are not supported; merge them into the model's weights",
    "--lora-modules": "adapters are not supported; merge them into the model's weights",
    "--enable-auto-tool-choice": "tool calls are not parsed",
    "--tool-call-parser": "tool calls are not parsed",
    "--reasoning-parser": "reasoning is not separated from the text",
    "--uvicorn-log-level": "set the environment variable PACELINE_LOG_LEVEL",
    "--allowed-origins": "no cross-origin headers are sent; add them in a proxy",
    "--root-path": "paths are fixed; change them in a proxy",
    "--compilation-config": "compilation and recording are automatic",
    "--hf-overrides": "the model's config.json is used unchanged",
}
"""Options without an equivalent, with the reason or an alternative."""


def _context(source: str) -> list[str]:
    """Options for a context source without a draft."""
    return ["--draft-model", "none", "--sources", source]


_DTYPES: Final = {"half": "float16", "float": "float32"}
"""Additional names of number formats in vLLM."""
_NUMBER, _TREE = "num_speculative_tokens", "speculative_token_tree"
_DRAFT_SETTINGS: Final = {
    "model": "--draft-model",
    _NUMBER: "--num-speculative-tokens",
    "prompt_lookup_min": "--prompt-lookup-min",
    "prompt_lookup_max": "--prompt-lookup-max",
    "suffix_decoding_max_tree_depth": "--suffix-max-tree-depth",
    "suffix_decoding_max_cached_requests": "--suffix-cached-requests",
    "suffix_decoding_max_spec_factor": "--suffix-max-spec-factor",
    "suffix_decoding_min_token_prob": "--suffix-min-token-prob",
}
_METHODS: Final = {"draft_model": [], "ngram": _context("prompt-lookup"), "suffix": _context("suffix")}
_SPECULATION: Final = ("--speculative-config", "-sc")


def translated(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Translate vLLM's options in a command line to Paceline's; `known` options are Paceline's own.

    Raises InvalidArgumentError naming the option as typed.
    """
    result: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*result, word, *rest]
        name, joined, value = word.partition("=")
        name = name if name.startswith("--") or name in NOT_HERE or name in _SPECULATION else ""
        name = name.replace("_", "-")

        def argument(name: str = name, joined: str = joined, value: str = value) -> str:
            if joined:
                return value
            if not rest:
                raise InvalidArgumentError(name, "requires an argument")
            return rest.pop(0)

        if not name:
            result.append(word)
        elif name in known and name != "--dtype":
            result.append(name + joined + value)
        elif name == "--dtype":
            given = argument()
            result += [name, _DTYPES.get(given, given)]
        elif name in SAME_MEANING:
            result.append(SAME_MEANING[name] + joined + value)
        elif name in _SPECULATION:
            result += _speculation(name, argument())
        elif name in SO_ANYWAY and _is_so(name, argument):
            continue
        elif name in NOT_HERE:
            raise InvalidArgumentError(name, f"is an option of vLLM without an equivalent: {NOT_HERE[name]}")
        else:
            result.append(word)
    return result


def _is_so(name: str, argument: Callable[[], str]) -> bool:
    allowed = SO_ANYWAY[name]
    return allowed is None or argument() in ((allowed,) if isinstance(allowed, str) else allowed)


def _speculation(name: str, text: str) -> list[str]:
    """Paceline's options for vLLM's JSON description of the draft."""
    try:
        settings: Mapping[str, Any] = json.loads(text)
    except ValueError:
        settings = {}
    if not isinstance(settings, dict) or not settings:
        raise InvalidArgumentError(name, 'must be JSON, such as {"model": …, "num_speculative_tokens": 5}')
    result = []
    if _TREE in settings:
        # vLLM's number of draft tokens is the number of nodes.
        result = _bounds(name, settings[_TREE])
        settings = {key: value for key, value in settings.items() if key not in (_TREE, _NUMBER)}
    for key, value in settings.items():
        if key in _DRAFT_SETTINGS:
            result += [_DRAFT_SETTINGS[key], str(value)]
        elif key == "method" and value in _METHODS:
            result += _METHODS[value]
        elif (key, value) != ("draft_tensor_parallel_size", 1):
            raise InvalidArgumentError(
                name, f"{key} {value!r} is not supported: the draft is a separate model (--draft-model)"
            )
    return result


def _bounds(name: str, tree: Any) -> list[str]:
    """Paceline's options for the bounds of vLLM's tree; the draft chooses the shape within them.

    The tree is a text: a list of nodes, each a tuple with the number of every child on the way to it.
    """
    try:
        nodes = set(map(tuple, ast.literal_eval(tree)))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        nodes = set()
    if not nodes or not all(node and all(type(i) is int and i >= 0 for i in node) for node in nodes):
        why = f"{_TREE} {tree!r} must be a list of paths, such as [(0,), (1,), (0, 0)]"
        raise InvalidArgumentError(name, why)
    depth, width = max(map(len, nodes)), 1 + max(map(max, nodes))
    bounds = ["--tree-width", str(width), "--max-tree-nodes", str(len(nodes))] if width > 1 else []
    return ["--num-speculative-tokens", str(depth), *bounds]
