"""A fingerprint that tells whether two workers serve the same weights."""

from __future__ import annotations

import hashlib
from typing import Final

import torch
from torch import nn

SAMPLES: Final = 64
"""Values that count of each parameter: reading all of a large model would take seconds."""


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) over each parameter's name, shape and evenly spaced values, as float32.

    Equal for one checkpoint in several dtypes that hold its values exactly.
    """
    digest, values = hashlib.sha256(), []
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)};".encode())
        flat = parameter.detach().flatten()
        values.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].float())
    if values:
        digest.update(torch.cat(values).cpu().numpy().tobytes())
    return digest.hexdigest()
