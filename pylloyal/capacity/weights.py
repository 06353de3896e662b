"""Where a model's tensors go, and what they take there."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .geometry import Geometry
from .header import Header, Tensor
from .memory import ALIGNMENT
from .settings import Settings, padded

HOST: Final = -1  # the place of what stays in system memory; accelerators are 0, 1, ...
_LAYER: Final = re.compile(r"(?:blk|enc\.blk|dec\.blk)\.(\d+)\.")
# Loaders that leave a draft head's tensors where they are, as stores ask them to.
_SKIP_NEXTN: Final = frozenset({"deepseek2", "deepseek32", "deepseek4", "qwen3next", "step35", "glm5-next", "bailingmoe3", "mistral4"})


@dataclass(frozen=True, slots=True)
class Placement:
    """A device for every layer, as the engine deals them out.

    Attributes
    ----------
    layers : tuple of int
        Of each layer: ``HOST`` or the number of an accelerator.
    output : int
        Of the output layer.
    """

    layers: tuple[int, ...]
    output: int

    @property
    def devices(self) -> tuple[int, ...]:
        return (HOST, *sorted({*self.layers, self.output} - {HOST}))

    def where(self, layer: int) -> int:
        """Of a layer that may be one the engine adds after the last."""
        return self.layers[layer] if layer < len(self.layers) else self.output


def place(geometry: Geometry, settings: Settings, shares: Sequence[int]) -> Placement:
    """Deals out the layers.

    Parameters
    ----------
    shares : sequence of int
        How much each accelerator is to get, in any unit; the engine takes their free bytes.

    Source: ``llama_model_base::load_tensors``: the last ``gpu_layers`` of the layers and the output layer go to the accelerators, in order,
    each as many as its share; the input layer stays.
    """
    n_all = geometry.n_layer_all
    wanted = n_all + 1 if settings.gpu_layers < 0 else min(settings.gpu_layers, n_all + 1)
    if wanted == 0 or not shares:
        return Placement((HOST,) * n_all, HOST)
    first, total = n_all + 1 - wanted, sum(shares)

    def device(layer: int) -> int:
        if layer < first:
            return HOST
        passed = 0
        for number, share in enumerate(shares):
            passed += share
            if (layer - first) * total < passed * wanted:  # the first whose running share is above this layer's part
                return number
        return len(shares) - 1

    return Placement(tuple(device(i) for i in range(n_all)), device(n_all))


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of tensors.

    Attributes
    ----------
    by_device : dict of int to int
    is_exact : bool
        Every tensor is known to be loaded.
    table : int
        Bytes of the token table, where it is the output layer too. Input and output in different buffers each have it, and then it is
        counted twice; in one buffer a mapped file has it once.
    """

    by_device: dict[int, int]
    is_exact: bool
    table: int

    @property
    def bytes(self) -> int:
        return sum(self.by_device.values())


def weights(header: Header, geometry: Geometry, placement: Placement) -> Weights:
    """Bytes of a model's tensors by device, each padded as buffers pad them."""
    out: dict[int, int] = {}
    is_exact = True
    has_output, table = False, None
    for tensor in header.tensors:
        found = _LAYER.match(tensor.name)
        if found:
            layer = int(found[1])
            if layer >= geometry.n_layer:
                if geometry.architecture in _SKIP_NEXTN:
                    continue
                is_exact = False
            device = placement.where(layer)
        elif tensor.name.startswith("output"):
            device = placement.output
            has_output |= tensor.name == "output.weight"
        else:
            device = HOST
            if tensor.name == "token_embd.weight":
                table = tensor
        out[device] = out.get(device, 0) + _padded(tensor)
    shared = _padded(table) if table and not has_output else 0
    if placement.output != HOST:
        out[placement.output] = out.get(placement.output, 0) + shared
    return Weights(out, is_exact, shared)


def _padded(tensor: Tensor) -> int:
    return padded(tensor.n_bytes, ALIGNMENT)
