"""Pictures and clips for the tests, made when they are needed: every mode, orientation and container, and ways to break them.

Each frame of a clip carries its own number: eight blocks of 16 x 16 pixels, white for one, from the lowest bit on. What a picture must
decode to is computed here with numpy alone, never by what is tested.
"""
from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
WIDTH, HEIGHT, _BLOCK = 160, 96, 16


# ------------------------------------------------------------------------------------------------------------------ pictures


def gradient(width: int = 24, height: int = 16, seed: int = 0) -> Pixels:
    """A smooth picture no two corners of which are alike."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    tilt = 40 + seed % 40
    return np.stack([255 * x, 255 * y, tilt + 60 * (x + y)], axis=-1).round().astype(np.uint8)


def turned(upright: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """The picture as stored, so that EXIF ``orientation`` makes it ``upright``; after the standard's own table of where row 0 and column 0 are."""
    ways = {1: lambda p: p, 2: lambda p: p[:, ::-1], 3: lambda p: p[::-1, ::-1], 4: lambda p: p[::-1], 5: lambda p: p.swapaxes(0, 1), 6: lambda p: p.swapaxes(0, 1)[::-1],
            7: lambda p: p.swapaxes(0, 1)[::-1, ::-1], 8: lambda p: p.swapaxes(0, 1)[:, ::-1]}
    return np.ascontiguousarray(ways[orientation](upright))


def saved(pixels: npt.NDArray[Any], kind: str, *, mode: str | None = None, orientation: int | None = None, **options: Any) -> bytes:
    """A file of Pillow's."""
    import PIL.Image

    picture = PIL.Image.fromarray(pixels)
    if mode is not None:
        picture = picture.convert(mode)
    if orientation is not None:
        exif = PIL.Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG from its parts; ``rows`` without the filter bytes."""
    stride = len(rows) // height if height else 0
    raw = b"".join(b"\0" + rows[y * stride : (y + 1) * stride] for y in range(height))
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *chunks, (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts)


def tiff(order: str, width: int, height: int, bits: int, photometric: int, data: bytes, sample_format: int = 1, n_samples: int = 1) -> bytes:
    """An uncompressed TIFF of one strip, by hand; ``order`` is "<" or ">"."""
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, n_samples, bits), (259, 3, 1, 1), (262, 3, 1, photometric), (273, 4, 1, 0), (277, 3, 1, n_samples), (278, 3, 1, height),
               (279, 4, 1, len(data)), (339, 3, 1, sample_format)]
    after = 8 + 2 + 12 * len(entries) + 4
    extra = b""
    body = struct.pack(order + "H", len(entries))
    for tag, kind, count, value in entries:
        if tag == 258 and n_samples > 2:
            body += struct.pack(order + "HHII", tag, kind, count, after)
            extra = struct.pack(order + "H" * n_samples, *[bits] * n_samples)
        elif kind == 3:
            body += struct.pack(order + "HHIHH", tag, kind, count, value, value if count == 2 else 0)
        else:
            body += struct.pack(order + "HHII", tag, kind, count, after + (6 if n_samples == 3 else 8 if n_samples == 4 else 0) if tag == 273 else value)
    return (b"II" if order == "<" else b"MM") + struct.pack(order + "HI", 42, 8) + body + struct.pack(order + "I", 0) + extra + data


def swapping_profile() -> bytes:
    """An ICC profile of RGB whose red and green have changed places: its effect cannot be missed."""
    import PIL.ImageCms

    raw = bytearray(PIL.ImageCms.ImageCmsProfile(PIL.ImageCms.createProfile("sRGB")).tobytes())
    n = struct.unpack_from(">I", raw, 128)[0]
    tags = {bytes(raw[132 + 12 * i : 136 + 12 * i]): 132 + 12 * i for i in range(n)}
    red, green = tags[b"rXYZ"], tags[b"gXYZ"]
    raw[red + 4 : red + 12], raw[green + 4 : green + 12] = raw[green + 4 : green + 12], raw[red + 4 : red + 12]
    return bytes(raw)


def picture_seeds() -> list[bytes]:
    """Small files of many kinds, to be broken."""
    import PIL.Image

    grad = gradient(40, 30)
    rgba = np.dstack([grad, grad[..., 0]])
    out = [saved(grad, kind) for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM", "TGA", "QOI", "PCX", "SGI", "JPEG2000", "AVIF", "ICO", "DDS")]
    out += [saved(rgba, kind) for kind in ("PNG", "WEBP", "TIFF", "ICO")]
    out += [saved(grad, "JPEG", orientation=6, icc_profile=swapping_profile()), saved(grad, "JPEG", mode="CMYK"), saved(grad, "PNG", orientation=3), saved(grad, "JPEG", progressive=True)]
    out += [saved(grad, "TIFF", compression=how) for how in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")]
    out += [saved(grad[..., 0].astype(np.uint16) * 257, "PNG"), saved(grad[..., 0].astype(np.uint16) * 257, "TIFF"), saved(grad, "PNG", mode="P"), saved(grad, "PNG", mode="1")]
    out += [animation(kind, [100, 50, 70]) for kind in ("GIF", "PNG", "WEBP")]
    two = io.BytesIO()
    PIL.Image.fromarray(grad).save(two, "MPO", save_all=True, append_images=[PIL.Image.fromarray(grad[::-1])])
    return [*out, two.getvalue()]


# --------------------------------------------------------------------------------------------------------------------- clips


def numbered(i: int, width: int = WIDTH, height: int = HEIGHT, colour: tuple[int, int, int] = (90, 120, 60)) -> Pixels:
    """A frame that says it is number ``i``."""
    out = np.empty((height, width, 3), np.uint8)
    out[:] = colour
    for bit in range(8):
        out[:_BLOCK, bit * _BLOCK : (bit + 1) * _BLOCK] = 255 if i >> bit & 1 else 0
    return out


def number_of(pixels: Pixels, wide: float = 1.0, high: float = 1.0) -> int:
    """What number a frame says it is; -1 when it does not say it clearly."""
    total = 0
    for bit in range(8):
        x, y = int((bit + 0.5) * _BLOCK * wide), int(_BLOCK / 2 * high)
        light = float(pixels[y - 3 : y + 3, x - 3 : x + 3].mean())
        if 70 < light < 185:
            return -1
        total |= (light > 127) << bit
    return total


def animation(kind: str, durations_ms: Sequence[int]) -> bytes:
    """GIF, PNG or WEBP of numbered frames."""
    import PIL.Image

    frames = [PIL.Image.fromarray(numbered(i)) for i in range(len(durations_ms))]
    out = io.BytesIO()
    extra = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=list(durations_ms), loop=0, **extra)
    return out.getvalue()


def clip(times_ms: Sequence[int], *, codec: str = "libx264", container: str = "mp4", pixel: str = "yuv420p", options: dict[str, str] | None = None, muxer: dict[str, str] | None = None,
         size: tuple[int, int] = (WIDTH, HEIGHT), rotation: int | None = None, hflip: bool = False, sar: Fraction | None = None, space: tuple[int, int] | None = None,
         last_ms: int = 40, gop: int = 12, b_frames: int = 0, colour: tuple[int, int, int] = (90, 120, 60), sound: bool = False, stored: Any = None, ticks: int = 1000) -> bytes:
    """A clip of numbered frames shown at ``times_ms``.

    ``space`` is (AVColorSpace, AVColorRange) of the pixels; ``stored`` turns a frame as it is stored.
    """
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=container, options=muxer or {}) as file:
        stream: Any = file.add_stream(codec, rate=25)
        own = dict(options or {})
        if codec == "libx264":
            own = {"preset": "ultrafast", "crf": "12", "sc_threshold": "0", "keyint_min": "1", **own, "bf": str(b_frames), "b-adapt": "0"}
            if b_frames:
                own["x264-params"] = own.get("x264-params", "") + f":bframes={b_frames}:b-adapt=0:weightp=0"
        elif codec == "libvpx-vp9":
            own = {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "0", "crf": "20", "b": "0", **own}
        stream.options = own
        stream.width, stream.height = size
        stream.pix_fmt = pixel
        stream.codec_context.gop_size = gop
        if codec in ("mpeg4", "mjpeg", "mpeg2video"):
            stream.bit_rate = 2_000_000
            if b_frames:
                stream.codec_context.max_b_frames = b_frames
        base = Fraction(1, ticks)
        stream.time_base = stream.codec_context.time_base = base
        if rotation is not None or hflip:
            stream.set_display_rotation(rotation or 0, hflip=hflip)
        if sar is not None:
            stream.codec_context.sample_aspect_ratio = sar
        if space is not None:
            stream.codec_context.colorspace, stream.codec_context.color_range = space
        voice: Any = file.add_stream("aac", rate=8000, layout="mono") if sound else None
        for i, at in enumerate(times_ms):
            pixels = numbered(i, *(size if stored is None else (WIDTH, HEIGHT)), colour)
            frame = av.VideoFrame.from_ndarray(pixels if stored is None else np.ascontiguousarray(stored(pixels)), format="rgb24")
            if space is not None:
                frame = frame.reformat(format=pixel, dst_colorspace={1: "ITU709", 5: "ITU601", 6: "ITU601"}[space[0]], dst_color_range={1: "MPEG", 2: "JPEG"}[space[1]])
            frame.pts, frame.time_base = at * ticks // 1000, base
            if hasattr(frame, "duration"):
                after = times_ms[i + 1] if i + 1 < len(times_ms) else at + last_ms
                frame.duration = (after - at) * ticks // 1000
            file.mux(stream.encode(frame))
        if voice is not None:
            wave = av.AudioFrame.from_ndarray(np.zeros((1, 8192), np.float32), format="fltp", layout="mono")
            wave.sample_rate = 8000
            file.mux(voice.encode(wave))
            file.mux(voice.encode(None))
        file.mux(stream.encode(None))
    return out.getvalue()


def tone(seconds: float = 0.5, *, rate: int = 8000, cover: bool = False) -> bytes:
    """A WAV of 440 Hz; with ``cover`` an MP4 of sound and a picture attached to it."""
    import av

    wave = (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)
    out = io.BytesIO()
    with av.open(out, "w", format="mp4" if cover else "wav") as file:
        stream: Any = file.add_stream("aac" if cover else "pcm_s16le", rate=rate, layout="mono")
        art: Any = None
        if cover:
            art = file.add_stream("mjpeg", rate=1)
            art.width, art.height, art.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
            art.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(wave[None] if cover else (wave * 32767).astype(np.int16)[None], format="fltp" if cover else "s16", layout="mono")
        frame.sample_rate = rate
        if art is not None:
            file.mux(art.encode(av.VideoFrame.from_ndarray(numbered(3), format="rgb24")))
            file.mux(art.encode(None))
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def lying(mp4: bytes, seconds: int) -> bytes:
    """An MP4 or Matroska file whose headers claim another length."""
    raw = bytearray(mp4)
    at = raw.find(b"\x44\x89\x88")  # Matroska's Duration, a double
    if raw.startswith(b"\x1aE\xdf\xa3"):
        struct.pack_into(">d", raw, at + 3, seconds * 1000.0)
        return bytes(raw)
    for kind, at_scale, at_length in ((b"mvhd", 16, 20), (b"mdhd", 16, 20), (b"tkhd", None, 24), (b"elst", None, 12)):
        at = raw.find(kind)
        while at >= 0:
            scale = struct.unpack_from(">I", raw, at + at_scale)[0] if at_scale else 1000
            struct.pack_into(">I", raw, at + at_length, seconds * scale)
            at = raw.find(kind, at + 4)
    return bytes(raw)


def clip_seeds() -> list[bytes]:
    """Small clips of many kinds, to be broken."""
    times = list(range(0, 480, 40))
    small = (WIDTH, 32)
    return [clip(times, b_frames=2, size=small, gop=6), clip(times, container="matroska", b_frames=2, size=small), clip(times, container="mpegts", size=small, ticks=90000),
            clip(times, codec="mpeg4", container="avi", size=small), clip(times, codec="libvpx-vp9", container="webm", size=small),
            clip(times, codec="mjpeg", container="avi", pixel="yuvj420p", size=small),
            clip(times, codec="ffv1", container="matroska", size=small), clip(times, rotation=90, sound=True, size=small), clip(times, muxer={"movflags": "frag_keyframe+empty_moov"}, size=small),
            animation("GIF", [40] * 12), animation("WEBP", [40] * 12), animation("PNG", [40] * 12)]


def sound_seeds() -> list[bytes]:
    """Small files with sound, to be broken."""
    return [tone(), tone(cover=True), clip([0, 40, 80], sound=True)]


def solid(yuv: tuple[int, int, int], *, space: int, full: int, bits: int = 8) -> bytes:
    """A lossless clip of one frame of these values, tagged with this AVColorSpace and AVColorRange; nothing has converted it."""
    import av

    out = io.BytesIO()
    planes = np.empty((3, 32, 32), np.uint8 if bits == 8 else np.uint16)
    planes[:] = np.array(yuv).reshape(3, 1, 1) << (bits - 8)
    with av.open(out, "w", format="matroska") as file:
        stream: Any = file.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv444p" if bits == 8 else f"yuv444p{bits}le"
        stream.codec_context.colorspace, stream.codec_context.color_range = space, full
        frame = av.VideoFrame(32, 32, stream.pix_fmt)
        for plane, values in zip(frame.planes, planes, strict=True):
            rows = np.zeros((32, plane.line_size), np.uint8)
            raw = values.view(np.uint8).reshape(32, -1)
            rows[:, : raw.shape[1]] = raw
            plane.update(rows.tobytes())
        frame.colorspace, frame.color_range, frame.pts = space, full, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


# ------------------------------------------------------------------------------------------------------------------ breakage


def mutated(seeds: Sequence[bytes], seed: int) -> bytes:
    """One of the files, broken in one of many ways."""
    rng = random.Random(seed)
    raw = bytearray(seeds[seed % len(seeds)])
    way = rng.randrange(7)
    if way == 0:
        del raw[rng.randrange(len(raw)) :]
    elif way == 1:
        for _ in range(rng.choice((1, 2, 8, 64))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif way == 2:  # headers are where lengths and sizes stand
        for _ in range(rng.choice((1, 2, 4))):
            raw[rng.randrange(min(len(raw), 200))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif way == 3:
        at, n = rng.randrange(len(raw)), rng.randrange(1, 65)
        raw[at : at + n] = rng.randbytes(n)
    elif way == 4:
        other = seeds[rng.randrange(len(seeds))]
        at = rng.randrange(len(raw))
        raw[at:] = other[rng.randrange(len(other)) :]
    elif way == 5:
        at, n = rng.randrange(len(raw)), rng.randrange(1, 400)
        raw[at:at] = raw[at : at + n] * rng.choice((1, 2, 50))
    else:
        at = rng.randrange(max(1, len(raw) - 4))
        raw[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 65536)))
    return bytes(raw)
