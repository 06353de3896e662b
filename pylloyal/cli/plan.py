"""Say from a model's header what fits, why, and what would help, before anything is loaded. Needs no native library, but with --verify,
which asks the engine for the same numbers, still without loading a weight.

Exit status: 0 it fits, 2 it is refused, 1 there was an error.
"""
from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from .interrupts import Interrupts
from .terminal import BOLD, DIM, Terminal, plural

if TYPE_CHECKING:
    from ..capacity.plan import Plan
    from ..kernel.dry_run import DryRun

USAGE_STATUS = 1  # 2 says something else here
BAR = 60
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
TABLE_KV = ("f16", "q8_0", "q4_0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or the first one of a split model")
    asked = parser.add_argument_group("what is asked for")
    asked.add_argument("--context", metavar="N", help='tokens, "32k" for 32,768 (default: what the model is trained for, as far as memory goes)')
    asked.add_argument("--branches", metavar="N", type=int, default=8, help="branches alive at once (default: %(default)s)")
    asked.add_argument("--batch", metavar="N", type=int, default=512, help="tokens of a call (default: %(default)s)")
    asked.add_argument("--ubatch", metavar="N", type=int, default=0, help="tokens of a dispatch (default: those of a call)")
    asked.add_argument("--kv", metavar="TYPE", help="type of the cells: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl (default: f16)")
    asked.add_argument("--kv-k", metavar="TYPE", help="of K alone")
    asked.add_argument("--kv-v", metavar="TYPE", help="of V alone")
    flag = argparse.BooleanOptionalAction
    asked.add_argument("--swa-full", action=flag, default=True, help="cells for the whole context in sliding-window layers too")
    asked.add_argument("--flash-attn", action=flag, default=True, help="flash attention")
    asked.add_argument("--unified", action=flag, default=True, help="one stream of cells that branches share; stores always have one")
    asked.add_argument("--rs-seq", metavar="N", type=int, default=0, help="recurrent states kept to roll back to (default: %(default)s)")
    asked.add_argument("--outputs", metavar="N", type=int, default=0, help="rows of logits in a dispatch (default: one a branch)")
    asked.add_argument("--mmproj", metavar="P", help="a projector that is open beside the model")
    asked.add_argument("--image", metavar="WxH", action="append", default=[], help="a picture that is to fit; may be given again")
    asked.add_argument("--clip", metavar="Ss@Nfps", action="append", default=[], help='a clip that is to fit: "30s@2fps", "30s@2fps:640x360"; may be given again')
    where = parser.add_argument_group("where")
    where.add_argument("--memory", metavar="SIZE", help='plan for so much system memory, "24GiB" (default: what this machine has free)')
    where.add_argument("--device", metavar="NAME=SIZE", action="append", default=[], help='an accelerator: "CUDA0=24GiB", or "CUDA0=22GiB/24GiB", free of all; may be given again')
    where.add_argument("--gpu-layers", metavar="N", type=int, default=0, help="layers on accelerators, -1 for all (default: %(default)s)")
    where.add_argument("--threads", metavar="N", type=int, help="for the CPU, each with scratch of its own (default: the cores this process may use)")
    where.add_argument("--offload-kqv", action=flag, default=True, help="cells lie where their layers do")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    shown.add_argument("--table", action="store_true", help="what fits, by context and type of the cells")
    shown.add_argument("--picture", metavar="PNG", help="draw the ledger and the table")
    shown.add_argument("--verify", action="store_true", help="ask the engine, and print what it says beside what was planned")


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Plan and tell."""
    made = make(args)
    interrupts.check()
    ran = _ask_engine(made, args) if args.verify else None
    rows = _table(made) if args.table or args.picture else []
    if args.picture:
        from .plan_picture import draw

        draw(made, rows).save(args.picture, "PNG")
    if args.json:
        told = made.to_json() | ({"verified": _compared(made, ran)} if ran is not None else {}) | ({"table": rows} if args.table else {})
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        out = Terminal(sys.stdout)
        lines = describe(made, out)
        lines += ["", *_table_lines(rows, out)] if args.table else []
        lines += ["", *_verified(made, ran, out)] if ran is not None else []
        lines += [f"picture: {args.picture}"] if args.picture else []
        out.write("\n".join(lines) + "\n")
    return 2 if made.binding else 0


def make(args: argparse.Namespace) -> Plan:
    """The plan the arguments describe."""
    from ..capacity.plan import plan

    return plan(args.model, context=args.context, branches=args.branches, batch=args.batch, ubatch=args.ubatch, kv=args.kv, kv_k=args.kv_k, kv_v=args.kv_v, swa_full=args.swa_full,
                flash_attn=args.flash_attn, unified=args.unified, rs_seq=args.rs_seq, outputs=args.outputs, gpu_layers=args.gpu_layers, offload_kqv=args.offload_kqv, threads=args.threads,
                memory=args.memory, devices=[_device(text) for text in args.device], mmproj=args.mmproj, image=args.image, clip=args.clip)


def _device(text: str) -> Any:
    from ..capacity.devices import FixedPool
    from ..capacity.sizes import parse_bytes
    from .commands import UsageError

    name, equals, size = text.partition("=")
    free, slash, total = size.partition("/")
    if not name or not equals:
        raise UsageError(f'--device {text!r}: "CUDA0=24GiB" is one')
    return FixedPool(name, parse_bytes(total if slash else free), parse_bytes(free))


# ---------------------------------------------------------------------------------------------------------- for people


def describe(made: Plan, out: Terminal) -> list[str]:
    """Lines for a person to read."""
    shape, s = made.geometry, made.settings
    kinds = [plural(len(layers), f"{name} layer") for name, layers in (*((g.name, g.layers) for g in shape.groups), *((one.name, one.layers) for one in shape.states))]
    types = s.type_k if s.type_k == s.type_v else f"K {s.type_k}, V {s.type_v}"
    lines = [out.paint(made.model, BOLD) + f"  {shape.architecture}, {plural(shape.n_layer, 'layer')}" + (f" ({', '.join(kinds)})" if len(kinds) > 1 else ""),
             f"{plural(s.n_branches, 'branch', 'branches')}, {types} cells, dispatches of {made.context.n_ubatch:,} tokens, flash attention {'on' if s.uses_flash(shape) else 'off'}"
             + (f", sliding window of {shape.n_swa:,}" if shape.has_window else ""), ""]
    lines.append(out.paint(f"fits: a context of {made.n_ctx:,} tokens" if not made.binding else f"refused: {made.why}", BOLD))
    lines.append("")
    for name, window in made.windows.to_json().items():
        tokens = "-" if name == "requested" and not window["tokens"] else f"{window['tokens']:,}"
        lines.append(f"  {name:<10}{tokens:>15}  {window['bound']:<10}{window['counterfactual']}".rstrip())
    for budget in made.budgets:
        lines += ["", *_ledger(made, budget.device, out)]
    if made.remedies:
        lines += ["", "what would help:" if made.binding else "for a longer context:", *(f"  {remedy}" for remedy in made.remedies)]
    if made.media:
        lines += ["", "of the context:", *(f"  {what:<20}{cells:>10,} cells" for what, cells in made.media)]
    return lines + [f"note: {note}" for note in made.notes]


def _ledger(made: Plan, device: int, out: Terminal) -> list[str]:
    from ..capacity.sizes import format_bytes

    budget = next(b for b in made.budgets if b.device == device)
    own = [line for line in made.ledger if line.device == device]
    if not budget.is_known:
        return [f"{budget.name}: free memory not known"]
    total = budget.total if budget.total is not None else budget.free or 0
    lines = [f"{budget.name}, {format_bytes(total)}" + (f", {format_bytes(budget.free or 0)} free" if budget.total is not None else " free"), f"  [{bar([line.bytes for line in own], total)}]"]
    marks = iter(MARKS * 4)
    for line in own:
        mark = next(marks)
        if line.bytes or line.name in ("weights", "left over"):
            lines.append(f"  {mark} {line.name:<22}{format_bytes(line.bytes):>14}  {out.paint(line.known, DIM)}")
    return lines


MARKS = "#=:+*%o@x-."


def bar(parts: list[int], total: int, width: int = BAR) -> str:
    """Parts of a whole side by side, each with its mark, in whole characters; what overflows is cut off."""
    if total <= 0:
        return " " * width
    text, passed, marks = "", 0, iter(MARKS * 4)
    for i, part in enumerate(parts):
        mark = next(marks)
        passed += max(0, part)
        text += (mark if i < len(parts) - 1 else " ") * (min(width, passed * width // total) - len(text))
    return text.ljust(width)[:width]


# ----------------------------------------------------------------------------------------------------------- the table


def _table(made: Plan) -> list[dict[str, Any]]:
    """Bytes for contexts and types of cells, and whether they fit."""
    from ..capacity.search import fits, largest

    known = all(budget.is_known for budget in made.budgets)
    top = max(made.geometry.n_ctx_train, CONTEXTS[0])
    rows = []
    for kv in dict.fromkeys((made.settings.type_k, *TABLE_KV)):
        settings = made.settings.but(type_k=kv, type_v=kv)
        if settings.conflicts(made.geometry):
            continue
        demand = made.demand.but(settings)
        sizes = [{"context": n, "bytes": sum(line.bytes for line in demand.lines(n)), "fits": known and fits(demand, made.budgets, n)} for n in CONTEXTS if n <= top]
        rows.append({"kv": kv, "largest": largest(demand, made.budgets) if known else None, "contexts": sizes})
    return rows


def _table_lines(rows: list[dict[str, Any]], out: Terminal) -> list[str]:
    from ..capacity.sizes import format_bytes

    if not rows:
        return []
    lines = ["everything together, by context and type of the cells (* does not fit):", f"  {'':<8}" + "".join(f"{cell['context']:>13,}" for cell in rows[0]["contexts"]) + f"{'fits at most':>16}"]
    for row in rows:
        cells = "".join(f"{format_bytes(cell['bytes']) + (' ' if cell['fits'] else '*'):>13}" for cell in row["contexts"])
        lines.append(f"  {row['kv']:<8}{cells}{'not known' if row['largest'] is None else format(row['largest'], ','):>16}")
    return [lines[0], out.paint(lines[1], DIM), *lines[2:]]


# ---------------------------------------------------------------------------------------------------------- the engine


def _ask_engine(made: Plan, args: argparse.Namespace) -> DryRun:
    from ..opening import ask_engine

    return ask_engine(args.model, made.n_ctx, made.settings)


def _compared(made: Plan, ran: DryRun) -> list[dict[str, Any]]:
    """Planned and measured, side by side."""
    totals, sizes = made.totals, ("n_ctx", "n_ctx_seq", "n_batch", "n_ubatch", "n_seq_max")
    rows: list[dict[str, Any]] = [{"name": name, "planned": getattr(made.context, name), "measured": getattr(ran, name), "known": "exact"} for name in sizes]
    known = {line.kind: line.known for line in made.lines}
    pairs = (("kv_bytes", ran.kv_bytes), ("recurrent_bytes", ran.recurrent_bytes), ("output_bytes", ran.output_bytes), ("compute_bytes", ran.compute_bytes), ("weights_bytes", ran.model_bytes))
    rows += [{"name": name, "planned": totals[name], "measured": measured, "known": known.get(name.removesuffix("_bytes"), "exact")} for name, measured in pairs]
    # Nothing is mapped in a dry run, and then some models have a table of tokens twice that is the output too.
    twice = {"weights_bytes": made.demand.weights.table}
    return [row | {"agrees": row["planned"] >= row["measured"] if row["known"] == "bound" else row["measured"] - row["planned"] in (0, twice.get(row["name"], 0))} for row in rows]


def _verified(made: Plan, ran: DryRun, out: Terminal) -> list[str]:
    lines = [f"{'':<18}{'planned':>18}{'the engine':>18}"]
    for row in _compared(made, ran):
        verdict = "equal" if row["planned"] == row["measured"] else ("DIFFERS" if not row["agrees"] else "bound" if row["known"] == "bound" else "equal, once mapped")
        lines.append(f"  {row['name']:<16}{row['planned']:>18,}{row['measured']:>18,}  {verdict}")
    return [out.paint(lines[0], DIM), *lines[1:]]
