"""Broken pictures and clips, opened in a child process: each must open, or fail with a MediaError that names it, within bounds.

``python tools/media_hostile.py image 0 600`` opens the first 600; the tests do it through :func:`run_mutants`.
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEMORY, SECONDS = 3 << 30, 20  # address space of the child; processor time for one file


def run_mutants(kind: str, n: int) -> None:
    """Open ``n`` broken files; raises AssertionError that names the first one that crashed, hung or failed in another way."""
    done = subprocess.run([sys.executable, __file__, kind, "0", str(n)], capture_output=True, text=True, errors="replace", env={**os.environ, "PYTHONPATH": str(ROOT)},
                          timeout=300 + n, check=False)
    is_done = done.returncode == 0 and f"{n} opened" in done.stdout
    assert is_done, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def main(kind: str, first: int, n: int) -> int:
    import faulthandler
    import resource
    import signal
    import tempfile

    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    import media_fixtures

    from pylloyal import errors
    from pylloyal.sources.audio import Audio
    from pylloyal.sources.image import Image
    from pylloyal.sources.video import Video

    faulthandler.enable()
    if "san.so" not in os.environ.get("LD_PRELOAD", ""):  # a sanitiser maps terabytes for its own books
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a hang kills the child
    seeds = {"image": media_fixtures.picture_seeds, "clip": media_fixtures.clip_seeds, "sound": media_fixtures.sound_seeds}[kind]()
    n_whole, slowest = 0, (0.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "mutant")
        for seed in range(first, first + n):
            Path(path).write_bytes(media_fixtures.mutated(seeds, seed))
            os.write(2, f"{kind} {seed}\n".encode())
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            began = time.process_time()
            try:
                if kind == "sound":
                    assert Audio(path, max_s=60).decode(16000).size <= 60 * 16000
                else:
                    one = Image(path) if kind == "image" else Video(path, fps=10, max_frames=16)
                    assert one.report.size[0] * one.report.size[1] <= 64_000_000
                n_whole += 1
            except errors.MediaError as error:
                said = str(error)
                assert path in said, f"{seed}: the message does not name the file: {said}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            slowest = max(slowest, (time.process_time() - began, seed))
    print(f"{n} opened: {n_whole} in whole or part, {n - n_whole} refused; slowest {slowest[0]:.2f} s (seed {slowest[1]}); at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
