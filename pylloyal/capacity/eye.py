"""What a projector's header says of how it takes pictures.

Source: ``load_hparams`` of the pinned engine's clip.cpp.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import InvalidArgumentError, MetadataError

Size = tuple[int, int]
MOST_SIDE: Final = 65536  # what the engine scales a picture to at most


@dataclass(frozen=True, slots=True)
class Kind:
    """What the engine knows of a type of projector, and the file need not say.

    Attributes
    ----------
    marks : int
        Tokens it puts around a picture, each one token of a vocabulary that was made for it; kinds with tiles add more (layout.py).
    merge : int
        Patches merged on each side, when the file does not say.
    merge_key : str
        Where the file says.
    tokens : (int, int)
        Least and most rows of a picture of dynamic size; zeros for none.
    says_pixels : bool
        The file has bounds of its own.
    is_fixed : bool
        Every picture is scaled to one size.
    """

    marks: int
    merge: int = 1
    merge_key: str = ""
    tokens: tuple[int, int] = (0, 0)
    says_pixels: bool = False
    is_fixed: bool = False


_SPATIAL, _SCALE = "clip.vision.spatial_merge_size", "clip.vision.projector.scale_factor"
MERGING: Final = frozenset(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl"))  # two frames of a clip share rows
KINDS: Final = {
    **dict.fromkeys((*MERGING, "glm4v"), Kind(2, 2, _SPATIAL, (8, 4096))),
    **dict.fromkeys(("mlp", "ldp", "ldpv2", "adapter", "cogvlm", "janus_pro"), Kind(0, is_fixed=True)),
    **dict.fromkeys(("mimovl", "exaone4_5"), Kind(2, 2, _SPATIAL, says_pixels=True)),
    "minimax_m3": Kind(2, 2, _SPATIAL, (8, 576)), "muse-glimmer": Kind(2, 2, _SPATIAL, (1, 4096)), "youtuvl": Kind(2, 2, _SPATIAL, (1, 62500)), "glm5v": Kind(2, 2, _SPATIAL, says_pixels=True),
    "hunyuanvl": Kind(2, 2, _SPATIAL, (256, 16384), says_pixels=True), "dots3note_v": Kind(2, 0, _SPATIAL, says_pixels=True), "dots_ocr": Kind(2, 0, _SCALE, says_pixels=True),
    "pixtral": Kind(1, 1, _SPATIAL, (8, 1024)), "lightonocr": Kind(2, 1, _SPATIAL), "phi4": Kind(0, says_pixels=True), "paddleocr": Kind(2, 2, says_pixels=True),
    "gemma3": Kind(2, 4, _SCALE, is_fixed=True), "gemma3nv": Kind(2, 1, _SCALE, is_fixed=True), "gemma4v": Kind(2, 3, _SCALE, (70, 1120)), "gemma4uv": Kind(2, 3, _SCALE, (70, 1120)),
    "kimivl": Kind(2, 1, _SCALE, (8, 1024)), "kimik25": Kind(2, 1, _SCALE, (2, 4096), says_pixels=True), "lfm2": Kind(2, 1, _SCALE, (64, 256)), "idefics3": Kind(0, 1, _SCALE),
    "internvl": Kind(2, 1, _SCALE), "llama4": Kind(2, 1, _SCALE), "nemotron_v2_vl": Kind(0, 1, _SCALE, is_fixed=True), "yasa2": Kind(2, is_fixed=True), "resampler": Kind(0),
    "minicpmv4_6": Kind(0, 4, _SCALE), "step3vl": Kind(0, 4, _SCALE),
}


@dataclass(frozen=True, slots=True)
class Eye:
    """An encoder of pictures.

    Attributes
    ----------
    kind : str
        The projector's type, as the file has it.
    image_size, patch, merge : int
        Pixels of its native square, of a patch, and patches merged on each side.
    min_pixels, max_pixels, longest_edge : int
        Bounds of a picture as it is encoded; 0 for none.
    candidates : tuple of (int, int)
        Resolutions a picture may be cut from.
    n_query : int
        Rows of a slice, for resamplers.
    has_ends, has_breaks : bool
        The encoder gives rows of its own: two around a picture; one after each line but the last.
    legacy_marks : bool
        minicpmv 2.5.
    """

    kind: str
    image_size: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    longest_edge: int
    candidates: tuple[Size, ...]
    n_query: int
    has_ends: bool
    has_breaks: bool
    legacy_marks: bool

    @property
    def align(self) -> int:
        return self.patch * self.merge


def number(header: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 0, most: int = (1 << 31) - 1) -> int:
    value = header.get(key, default)
    if value is None:
        raise MetadataError(f"the projector's header has no {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MetadataError(f"the projector's {key} is {value!r}; {least:,} to {most:,} can be")
    return value


def numbers(header: Mapping[str, Any], key: str, *, most: int) -> list[int]:
    """A list of whole numbers; empty when the file has none."""
    values = header.get(key, ())
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) > 4096 or any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= most for n in values):
        raise MetadataError(f"the projector's {key} is no list of at most 4,096 numbers from 0 to {most:,}")
    return list(values)


def kind_of(header: Mapping[str, Any], sense: str = "vision") -> str:
    """The type of a projector's encoder of pictures ("vision") or sound ("audio"); "" when it has none."""
    if header.get("general.architecture") != "clip":
        raise MetadataError(f"no projector: its general.architecture is {header.get('general.architecture')!r}, not 'clip'")
    if header.get(f"clip.has_{sense}_encoder") is not True:
        return ""
    kind = header.get("clip.projector_type") or header.get(f"clip.{sense}.projector_type")
    if not isinstance(kind, str):
        raise MetadataError("the projector's header does not name its type")
    return ("qwen2.5vl_merger" if sense == "vision" else "qwen2a") if kind == "qwen2.5o" else kind


def eye_of(header: Mapping[str, Any], image_min_tokens: int = 0, image_max_tokens: int = 0) -> Eye:
    """Read one.

    Raises
    ------
    MetadataError
        It does not see, is of a kind whose cells cannot be said from the header, or its keys are damaged.
    """
    for name, value in (("image_min_tokens", image_min_tokens), ("image_max_tokens", image_max_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SIDE:
            raise InvalidArgumentError(f"{name} is {value!r}; 0 to {MOST_SIDE:,} can be")
    kind = kind_of(header)
    if kind not in KINDS:
        raise MetadataError(f"projector type {kind!r}: what its pictures take cannot be said from its header" if kind else "this projector does not see")
    image_size, patch = number(header, "clip.vision.image_size", most=8192), number(header, "clip.vision.patch_size", least=1, most=65535)
    known = KINDS[kind]
    merge = number(header, known.merge_key, known.merge or None, least=1, most=1024) if known.merge_key else known.merge
    if kind == "gemma4uv":
        patch, merge = patch * merge, 1
    area = patch * patch * (4 if kind == "hunyuanvl" else merge * merge)  # it limits before it reads
    low = high = 0
    if known.tokens[1]:
        low, high = (image_min_tokens or known.tokens[0]) * area, (image_max_tokens or known.tokens[1]) * area
    if known.says_pixels:
        said = [number(header, f"clip.vision.image_{end}_pixels", 0 if known.tokens[1] else None) for end in ("min", "max")]
        if kind == "kimik25":
            low, high = said if all(said) else (low, high)
        else:
            low, high = said[0] or low, said[1] or high
    if kind in ("idefics3", "lightonocr", "glm5v"):
        low, high = image_min_tokens * area or low, image_max_tokens * area or high
    if high < low or high >= 1 << 31:
        raise MetadataError(f"the projector wants pictures of at least {low:,} and at most {high:,} pixels")
    longest = number(header, "clip.vision.preproc_image_size", image_size if kind == "lightonocr" else 0, most=1 << 20) if kind in ("idefics3", "lightonocr", "step3vl") else 0
    longest = longest or (3024 if kind == "step3vl" else 0)
    version = number(header, "clip.minicpmv_version", 0) if kind == "resampler" else 0
    if version not in (0, 2, 3, 4, 5, 6, 100045):
        raise MetadataError(f"projector type {kind!r} of version {version} is not known")
    if (known.is_fixed or kind in ("resampler", "minicpmv4_6", "idefics3", "internvl", "llama4", "step3vl")) and image_size < patch:
        raise MetadataError(f"the projector's image_size is {image_size}, smaller than a patch of {patch}")
    return Eye(kind, image_size, patch, merge, low, high, longest, _candidates(header, kind, image_size), number(header, "clip.minicpmv_query_num", 0, most=65536) or (64 if version > 2 else 96),
               kind in ("cogvlm", "adapter"), kind == "pixtral", version in (0, 2))


def _candidates(header: Mapping[str, Any], kind: str, side: int) -> tuple[Size, ...]:
    pins = numbers(header, "clip.vision.image_grid_pinpoints", most=MOST_SIDE)
    if len(pins) % 2 or 0 in pins:
        raise MetadataError("the projector's image_grid_pinpoints are no list of sizes")
    out = [(pins[i], pins[i + 1]) for i in range(0, len(pins), 2)]
    if kind == "internvl":
        least, most = number(header, "clip.vision.preproc_min_tiles", 1, most=4096), number(header, "clip.vision.preproc_max_tiles", 12, most=4096)
        if least > most:
            raise MetadataError(f"the projector wants at least {least} and at most {most} tiles")
        for a in range(least, most + 1) if least else ():
            out += [(a * side, b * side) for b in range(max(-(-least // a), least), min(most // a, most) + 1)]
        if not out:
            raise MetadataError("the projector has no resolutions to cut tiles from")
    if kind == "llama4":
        out += [(x * side, y * side) for x in (1, 2, 3) for y in (1, 2, 3) if (x, y) != (1, 1)]
    return tuple(out)
