"""The command line: ``pylloyal <command> ...``.

Exit status: 0 done, 1 refused or failed, 2 wrong usage, 130 stopped by Ctrl-C, 141 nobody reads the output any more.
"""
from __future__ import annotations

from collections.abc import Sequence

from .interrupts import Interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Ctrl-C is taken over before anything else is imported.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after the program's name. None takes those of the process, and takes the process over: a late
        Ctrl-C no longer changes its status, and characters the output's encoding lacks are escaped.

    Returns
    -------
    int
        Exit status.

    Raises
    ------
    SystemExit
        For ``--help`` and wrong usage, as argparse does.
    """
    interrupts = Interrupts()
    try:
        from .commands import run

        return run(argv, interrupts)
    finally:
        interrupts.end(is_exiting=argv is None)
