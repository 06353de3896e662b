"""Resume: read a document once, save the branch to a file, and go on in another process, another day.

The file holds the cells, the position, the logits and the sampler with its random stream: the other process begins with the very
token that would have come next, and all that follows is the same, token for token, as if nothing had happened.

Saved: the other process decodes nothing of the document. The price is the file: the bytes of its cells.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _work import Work, options, read_document, report, say, with_document

from pylloyal import Model, Sampling, describe_saved


def read_and_save(model: Model, args: argparse.Namespace, path: Path) -> list[int]:
    """Read the document, begin to go on, save; and what this process says after that."""
    with model.store(n_ctx=2048, n_branches=1, n_threads=args.threads) as store:
        root = store.root(sampling=Sampling(seed=args.seed))
        root.prefill(read_document(args))
        store.tick([root], n_steps=args.before)                            # so that the random stream is saved in mid-course
        root.save(path)
        return store.tick([root], n_steps=args.tokens).tokens[0]


def resume(model: Model, args: argparse.Namespace, work: Work) -> list[int]:
    with model.store(n_ctx=2048, n_branches=1, n_threads=args.threads) as store, work.of(store):
        return store.tick([store.load(args.resume)], n_steps=args.tokens).tokens[0]


def read_again(model: Model, args: argparse.Namespace, work: Work) -> list[int]:
    """Without the file: read the document again, and say again what was said before it went on."""
    with model.store(n_ctx=2048, n_branches=1, n_threads=args.threads) as store, work.of(store):
        root = store.root(sampling=Sampling(seed=args.seed))
        root.prefill(read_document(args))
        return store.tick([root], n_steps=args.before + args.tokens).tokens[0][args.before :]


def in_another_process(*how: str) -> tuple[dict[str, Any], Work]:
    """Run this program with the same arguments and a few more: what it found, and what it took."""
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--json", "--no-compare", *how], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    return found, Work(**found["here"], seconds=found["seconds"]["here"])


def main() -> None:
    parser = with_document(options(__doc__), chars=1200)
    parser.add_argument("--before", type=int, default=8, metavar="N", help="tokens to say before it is saved (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to say after it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="only go on from this file")
    parser.add_argument("--read-again", action="store_true", help="only do it the naive way")
    args = parser.parse_args()
    with Model(args.model) as model:
        if args.resume or args.read_again:
            work = Work()
            said = resume(model, args, work) if args.resume else read_again(model, args, work)
            report(args, "resume", work, None, "", said=said)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "document.branch"
            said = read_and_save(model, args, path)
            saved = describe_saved(path)
            resumed, here = in_another_process("--resume", str(path))
        again, naive = in_another_process("--read-again") if args.compare else (None, None)
        say(args, f"{model.vocab.decode(said)}\n\nsaved at position {saved['position']}: {saved['bytes']:,} bytes, {saved['bytes'] / saved['cells']:,.0f} a cell")
        say(args, f"another process went on {'with the same tokens' if resumed['said'] == said else 'DIFFERENTLY'}")
        report(args, "resume", here, naive, "read the document again, and say again what was said", said=said,
               resumed=resumed["said"], again=again and again["said"], saved_bytes=saved["bytes"], position=saved["position"])


if __name__ == "__main__":
    main()
