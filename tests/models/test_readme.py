"""The program in the README, as it stands there."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_program_runs(smollm2_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert program is not None
    # The model where it is, and less of the document: reading all of it takes a while on one thread.
    code = program[1].replace('"SmolLM2-135M-Instruct.Q4_1.gguf"', repr(str(smollm2_path))).replace('encoding="utf-8")', 'encoding="utf-8")[:1200]')
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    answers = done.stdout.splitlines()
    assert "Who tells the story?" in done.stdout
    assert answers[-1].startswith("Pressure(")
