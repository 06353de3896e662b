"""Sound, through PyAV: one channel of floats at the rate the projector hears."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import errors
from ..kernel.parts import Part, SoundPart
from ..kernel.projector import Projector
from .clip import open_container
from .image import ImageSource, name_of


@dataclass(frozen=True, slots=True)
class AudioReport:
    """What was decoded.

    Attributes
    ----------
    name, codec : str
    sample_rate : int
        In the file, in Hz.
    length_s : float
        Of what was decoded.
    n_damaged : int
        Packets that were skipped.
    """

    name: str
    codec: str
    sample_rate: int
    length_s: float
    n_damaged: int


class Audio:
    """Sound for a prompt, from any container FFmpeg knows.

    Parameters
    ----------
    source : path, bytes or file object
    start, end : float
        The stretch to hear, in seconds from its beginning. What lies before it is decoded, and not kept.
    max_s : float
        A stretch of more than this is refused.

    Raises
    ------
    MediaDecodeError, UnsupportedMediaError
        When the prompt is made: only then is the projector's rate known. Samples that are no numbers are refused by the prompt
        (:class:`~pylloyal.errors.MediaError`), with the name of the file.
    """

    def __init__(self, source: ImageSource, *, start: float = 0.0, end: float | None = None, max_s: float = 3600.0) -> None:
        if not 0 <= start < math.inf or (end is not None and not end > start):
            raise errors.InvalidArgumentError(f"start is {start} and end is {end}; sound begins at 0, and ends after it starts")
        if not 0 < max_s < math.inf:
            raise errors.InvalidArgumentError(f"max_s is {max_s}; it must be above 0, and finite")
        self.source, self.start, self.end, self.max_s = source, start, end, max_s
        self.report: AudioReport | None = None

    def parts(self, projector: Projector | None) -> Sequence[Part]:
        """The sound at the projector's rate."""
        rate = projector.statistics().sample_rate if projector is not None else 0
        if not rate:
            raise errors.ProjectorMismatchError(f"{name_of(self.source)}: there is no projector that hears")
        samples = self.decode(rate)
        return [SoundPart(samples, id=hashlib.blake2b(samples.data, digest_size=20).hexdigest())]

    def decode(self, rate: int) -> npt.NDArray[np.float32]:
        """Float32 samples, mono, shape (n,), at ``rate``."""
        name = name_of(self.source)
        try:
            with open_container(self.source) as container:
                import av

                if not container.streams.audio:
                    raise errors.UnsupportedMediaError(f"{name}: no sound in it")
                stream = container.streams.audio[0]
                if stream.codec_context is None:
                    raise errors.UnsupportedMediaError(f"{name}: its sound codec is not known here")
                resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
                blocks: list[npt.NDArray[np.float32]] = []
                first = int(self.start * rate)
                n, damaged, most = 0, 0, first + int(self.max_s * rate)  # n counts from the file's beginning

                def keep(part: av.AudioFrame) -> int:
                    block = part.to_ndarray().reshape(-1).astype(np.float32)
                    if n + block.size > first:
                        blocks.append(block[max(0, first - n) :])
                    return int(block.size)

                for packet in container.demux(stream):
                    try:
                        frames = packet.decode()
                    except av.FFmpegError:
                        damaged += 1
                        continue
                    for frame in frames:
                        for part in resampler.resample(frame):
                            n += keep(part)
                    if self.end is not None and n >= self.end * rate:
                        break
                    if n > most:
                        raise errors.UnsupportedMediaError(f"{name}: more than {self.max_s:g} s of sound")
                for part in resampler.resample(None):
                    n += keep(part)
                codec, own = stream.codec_context.name, stream.codec_context.sample_rate
        except errors.PylloyalError:
            raise
        except Exception as error:  # decoders raise whatever comes out of broken bytes
            raise errors.MediaDecodeError(f"{name}: {type(error).__name__}: {error}") from error
        samples = np.concatenate(blocks) if blocks else np.empty(0, np.float32)
        samples = samples[: None if self.end is None or math.isinf(self.end) else max(0, int(self.end * rate) - first)]
        if not samples.size:
            raise errors.MediaDecodeError(f"{name}: no sound can be decoded" + (f"; {damaged} packets are damaged" if damaged else ""))
        self.report = AudioReport(name, codec, own, samples.size / rate, damaged)
        return np.ascontiguousarray(samples)
