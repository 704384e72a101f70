"""Options of `vllm serve`, as `paceline serve` takes or refuses them: the one table of both names.

An option that means the same under another name is taken. One that has no meaning here is refused with the
reason, unless it asks for what Paceline does anyway.
"""

from __future__ import annotations

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
"""vLLM's option to ours."""

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
"""Options that ask for what Paceline does anyway, each with its possible values; None: it takes no value."""

_ONE_DEVICE: Final = "a model runs on one device here; --target-device and --draft-device choose it"
NOT_HERE: Final = {
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": "run one `paceline target-worker` a device, and name each with `--target`",
    "-dp": "run one `paceline target-worker` a device, and name each with `--target`",
    "--api-key": "keys stand in a file here: `paceline keys add NAME --api-keys keys.json` makes one, and "
    "`--api-keys keys.json` demands it",
    "--revision": "the hub's main revision is taken; for another one "
    "`hf download ID --revision REVISION --local-dir FOLDER`, then name the folder",
    "--tokenizer": "the tokenizer is the target model's own: it stands in its folder",
    "--kv-cache-dtype": "the cache has the number format of its model: --target-dtype, --draft-dtype",
    "--load-format": "weights are read from safetensors only",
    "--quantization": "weights are served as they are, and quantised checkpoints are not",
    "--tokenizer-mode": "the tokenizer is read from tokenizer.json",
    "--task": "only text generation is served",
    "--runner": "only text generation is served",
    "--seed": "each request has a seed of its own; the same seed gives the same tokens",
    "--swap-space": "a sequence that has to make room is computed again: nothing is swapped",
    "--cpu-offload-gb": "weights are on their device as a whole",
    "--download-dir": "the environment variable HF_HOME says where downloads are kept",
    "--no-enable-chunked-prefill": "long prompts are always computed in chunks (--max-batch-tokens)",
    "--enable-log-requests": "texts of requests are never logged; docs/observability.md says what is",
    "--enable-lora": "adapters are not served; merge them into the model's weights",
    "--lora-modules": "adapters are not served; merge them into the model's weights",
    "--enable-auto-tool-choice": "tool calls are not parsed",
    "--tool-call-parser": "tool calls are not parsed",
    "--reasoning-parser": "reasoning is not parsed out of the text",
    "--uvicorn-log-level": "the environment variable PACELINE_LOG_LEVEL sets the level",
    "--allowed-origins": "no cross-origin headers are sent; a proxy in front of it may add them",
    "--root-path": "paths are fixed; a proxy in front of it may change them",
    "--compilation-config": "what can be compiled or recorded is, without settings",
    "--attention-backend": "attention is torch's own",
    "--hf-overrides": "a model is served as its config.json says",
}
"""Options that have no counterpart here, each with the reason or with what to do instead."""

_DTYPES: Final = {"half": "float16", "float": "float32"}
"""vLLM's other names of number formats."""
_DRAFT_SETTINGS: Final = {"model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
_SPECULATION: Final = ("--speculative-config", "-sc")


def translated(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of a command line with our names for vLLM's; `known` options are ours and stay.

    Raises InvalidArgumentError naming the option as it was typed.
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
            raise InvalidArgumentError(name, f"is vLLM's, and refused here: {NOT_HERE[name]}")
        else:
            result.append(word)
    return result


def _is_so(name: str, argument: Callable[[], str]) -> bool:
    allowed = SO_ANYWAY[name]
    return allowed is None or argument() in ((allowed,) if isinstance(allowed, str) else allowed)


def _speculation(name: str, text: str) -> list[str]:
    """The draft that vLLM's JSON object describes, as our options."""
    try:
        settings: Mapping[str, Any] = json.loads(text)
    except ValueError:
        settings = {}
    if not isinstance(settings, dict) or not settings:
        raise InvalidArgumentError(name, 'must be JSON, such as {"model": …, "num_speculative_tokens": 5}')
    result = []
    for key, value in settings.items():
        if key in _DRAFT_SETTINGS:
            result += [_DRAFT_SETTINGS[key], str(value)]
        elif (key, value) == ("method", "ngram"):
            result += ["--draft-model", "none"]
        elif (key, value) not in (("method", "draft_model"), ("draft_tensor_parallel_size", 1)):
            raise InvalidArgumentError(
                name, f"{key} {value!r} is not known here: a draft is a model of its own (--draft-model)"
            )
    return result
