"""Random calls of every function of the ABI, with whatever a caller can pass that is not a lie about memory.

    python fuzz.py MODEL SEED CALLS LAST

Integers, floats, handles, flags and the fields of structs are anything; pointers are NULL or real memory, and counts are true of the
memory behind them or, where every pointer is NULL, anything. Arguments are made from the header by type and name, so a new function
is fuzzed the day it appears. LAST is a file that always holds the call being made: whoever finds this process dead reads there what
killed it.

What must hold: a call returns PYL_OK or a code of the header other than PYL_E_INTERNAL, and says why; a store that no call named is
untouched; in the end everything closes and nothing is left. Prints how often each function landed and was refused, as JSON.
"""
from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gen_capi

from pylloyal._ffi import capi, load

ROOM = 512   # elements of every array; also the vocabulary of a tiny model
STRUCTS = 8  # of every array of structs
INF = float("inf")
HUGE = (2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1)
INTS = (0, 1, -1, 2, 3, 4, 8, 63, 255, 256, 257, 258, 512, 65536, 65537, 2**24, 2**31 - 1, -2**31, -2**31 + 1)
FLOATS = (0.0, 1.0, -1.0, 0.5, 0.95, 2.0, 1e-30, -1e30, 3.4e38, INF, -INF, float("nan"))
# What a parameter or field of this name mostly is: else a call would seldom get past its first check, and now and then take all the machine's memory, cores or time.
MOSTLY: dict[str, tuple[Any, ...]] = {
    "n_ctx": (0, 1, 64, 255, 256, 300, 512, 2**31 - 1, 2**31, 2**32 - 1), "n_batch": (0, 4, 8, 63, 64, 512, 65536, 65537, 2**32 - 1), "n_branches": (0, 1, 2, 4, 8, 256, 257, 2**32 - 1),
    "n_threads": (0, 1, 1, 1, 2, 513, 2**31, 2**32 - 1), "n_steps": (0, 1, 2, 3, 40), "max_dispatches": (0, 0, 1, 2, 2**32 - 1), "flash_attn": (0, 1, 2, 3, -1), "type_k": (0, 0, *range(-1, 10), 2**31 - 1),
    "type_v": (0, 0, *range(-1, 10), -2**31), "swa_full": (1, 1, 0, -1), "use_mmap": (0, 1, -1), "vocab_only": (0, 0, 1), "start_pos": (0, 0, 0, 5, -1, 2**24, 2**31 - 1), "kind": (0, 1, 1, 0, 2, -1),
    "flags": (0, 0, 1, 2, 3, 4, 2**32 - 1), "level": (1, 2, 3, 4, 5, 0, 6, -1), "seed_mode": (0, 1, 0, 1, 2, -1), "temperature": (0.0, 0.8, 1.0, -1.0, 1e-30), "top_k": (0, 1, 40, -1, 2**31 - 1, -2**31),
    "top_p": (1.0, 0.95, 1e-30), "min_p": (0.0, 0.05, 1.0), "typical_p": (1.0, 0.5), "penalty_repeat": (1.0, 1.1, 1e30), "penalty_frequency": (0.0, -1e30), "penalty_presence": (0.0, 3.4e38),
    "penalty_last_n": (0, 1, 64, 65536, 65537, -1, -2**31), "levels": (0, 1, 2, 3, 4, -1), "pooling": (1, 0, 2, 3, 4, -1), "normalize": (0, 1, -1), "deterministic": (0, 0, 1), "max_tokens": (0, 0, 1, 2**32 - 1), "alpha": (0.5, -1.0, 0.0, 3.4e38, INF),
    "n_ubatch": (0, 0, 0, 0, 1, 4, 8, 64, 65537, 2**32 - 1), "n_rs_seq": (0, 0, 0, 1, 4, 64, 65, 2**32 - 1), "n_outputs": (0, 0, 0, 0, 8, 64, 2**32 - 1), "kv_unified": (1, 1, 1, 0, -1),
    "image_min_tokens": (0, 0, 0, 1, 2**32 - 1), "image_max_tokens": (0, 0, 0, 0, 1, 65537),
}
NEVER_WILD = {"n_ctx", "n_threads", "n_steps"}
PERMISSIVE = json.dumps({"grammar": "root ::= [^\\x00]*", "grammar_lazy": True, "triggers": [{"type": "pattern", "value": "t", "token": -1}]}).encode()
TEXTS: dict[str, tuple[bytes, ...]] = {
    "gbnf": (b"", b'root ::= "ab"', b'root ::= [a-z]* "x"', b"root ::= root", b'root ::= ("a"', b"root ::= (((((((("), "root": (b"root\0", b"root\0", b"none\0", b"\0"),
    "rendered": (PERMISSIVE, b'{"grammar": "root ::= [^\\\\x00]*"}', b'{"grammar": ""}', b'{"grammar": "root ::= "}', b"{}", b"[]"), "text": (b"the whale", b"", "日本語 🐋".encode(), b"\xff\xfe\x80", b"a\0b"),
    "request": (b'{"messages": [{"role": "user", "content": "hi"}]}', b'{"text": "hi", "parser": {"format": 0}}', b'{"messages": []}', b"null", b"{"),
}


class Fuzz:
    def __init__(self, path: str, seed: int, last: str) -> None:
        self.rng = random.Random(seed)
        self.path = path.encode()
        self.last = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.lib = ctypes.CDLL(str(load.library_path()))  # a second face of the same library, without the check that raises
        for name, result, arguments, _ in capi.PROTOTYPES:
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments
        header = gen_capi.parse(gen_capi.HEADER.read_text(encoding="utf-8"))
        self.functions = {function.name: function for function in header.functions}
        self.fields = {struct.name: struct.fields for struct in header.structs}
        self.names = sorted(self.functions)
        self.handles: dict[str, list[int]] = {name: [] for name in reversed(header.opaque) if name != "pyl_text"}  # given out once; alive or not; models last
        self.secret: set[int] = set()
        self.branches: dict[int, list[int]] = {}  # by store
        self.store = 0  # that of the call in the making
        self.blobs: list[bytes] = [b"", b"PYL"]  # saved branches
        self.kept: list[Any] = []  # memory behind pointers in structs
        self.landed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()

    # ------------------------------------------------------------------------------------------------------- arguments

    def branch(self) -> int:
        if (known := self.branches.get(self.store)) and self.rng.random() < 0.95:
            return (self.rng.choice(known[-10:]) + (self.rng.random() < 0.02) * self.rng.choice((1, 2**32, -2**32, 256))) % 2**64
        return int(self.rng.choice((0, 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, self.rng.getrandbits(64))))

    def handle(self, kind: str) -> int | None:
        if (pool := self.handles[kind]) and self.rng.random() < 0.95:
            self.store = self.rng.choice(pool[-3:])
            return self.store
        stranger = self.rng.choice([None, 1, 0x1000, 2**63, 2**64 - 1, self.rng.getrandbits(64), *(h for other in self.handles.values() for h in other[-2:])])
        return None if stranger in self.secret else stranger

    def scalar(self, kind: str, name: str = "") -> Any:
        if kind == "pyl_branch":
            return self.branch()
        if name in MOSTLY and (name in NEVER_WILD or self.rng.random() < 0.95):
            return self.rng.choice(MOSTLY[name])
        if kind in ("float", "double"):
            return self.rng.choice(FLOATS)
        return self.rng.choice(INTS) if self.rng.random() < 0.8 else self.rng.getrandbits(64) - 2**63

    def array(self, kind: str, room: int = ROOM, name: str = "") -> Any:
        array = (getattr(capi, gen_capi.SCALARS[kind][0]) * room)()
        if kind == "pyl_branch":  # mostly different ones
            known = list(dict.fromkeys(self.branches.get(self.store, [])[-10:]))
            self.rng.shuffle(known)
            array[:16] = [*known, *(self.branch() for _ in range(16))][:16]
        elif name == "lengths":  # of parts of an array of ROOM
            array[:24] = [self.rng.randrange(20) for _ in range(24)]
        elif kind == "float" and self.rng.random() < 0.7:
            array[:ROOM] = [self.rng.uniform(-3, 3) for _ in range(ROOM)]
        elif kind == "int32_t" and self.rng.random() < 0.8:
            array[:ROOM] = [self.rng.randrange(250) for _ in range(ROOM)]
        else:
            array[:16] = [self.scalar(kind) for _ in range(16)]
        return array

    def structs(self, kind: str) -> Any:
        array = (getattr(capi, kind) * STRUCTS)()
        right = ctypes.sizeof(array[0])
        # A struct is told by its first field how much of it there is.
        for item in array[: 1 if self.rng.random() < 0.5 else STRUCTS]:
            for name, ctype in self.fields[kind]:
                if name == "struct_size":
                    item.struct_size = right if self.rng.random() < 0.96 else self.rng.choice((0, 1, 3, 4, 8, right - 4, right + 1, 2**31, 2**32 - 1))
                elif ctype == "const int32_t*" and self.rng.random() < 0.95:
                    self.kept.append(self.array("int32_t"))
                    setattr(item, name, self.kept[-1])
                elif not ctype.endswith("*"):
                    setattr(item, name, self.scalar(ctype, name))
            for count, pointer in (("n_tokens", "tokens"), ("n_stop_tokens", "stop_tokens")):
                if hasattr(item, pointer):
                    setattr(item, count, self.rng.choice((0, 1, 3, 70)) if getattr(item, pointer) else self.rng.choice((0, 1, 2**31)))
            if kind == "pyl_part":  # its arrays have n entries, by the caller's word
                item.n = self.rng.choice((0, 1, 3, 8)) if item.tokens else self.rng.choice((0, 1, 300, *HUGE))
                item.width, item.height = (self.rng.choice((0, 1, 4, 8, 64, 400, 2**16 + 1, 2**32 - 1)) for _ in range(2))
                item.kind = self.rng.choice((item.kind, *range(5)))
        return array

    def arguments(self, params: list[tuple[str, str]]) -> list[Any]:
        nothing = self.rng.random() < 0.1  # every pointer NULL, every count anything
        room = STRUCTS if any(ctype.removeprefix("const ").removesuffix("*") in self.fields for ctype, _ in params) else ROOM
        length = 1
        out: list[Any] = []
        for ctype, name in params:
            kind = ctype.removeprefix("const ").rstrip("*")
            if ctype == "size_t":
                likely = [length] * 6 + [1, 1, 1, 2, 3] + ([300, 512] * 3 if "float*" in params[len(out) - 1][0] else [0, ROOM])
                out.append(self.rng.choice((0, 1, *HUGE)) if nothing else min(room, self.rng.choice(likely)))
            elif not ctype.endswith("*"):
                out.append(self.scalar(ctype, name))
            elif kind in self.handles and not ctype.endswith("**"):
                out.append(self.handle(kind))
            elif kind == "pyl_text" and not ctype.endswith("**"):
                out.append(None)  # the one kind of handle that is an address
            elif nothing or self.rng.random() < 0.02:
                out.append(None)
            elif ctype.endswith("**"):
                out.append((getattr(capi, f"{kind}_p") * 1)())
            elif ctype == "const uint8_t*":
                data = self.rng.choice(self.blobs[-6:])
                match self.rng.randrange(6):
                    case 0 if data:
                        at = self.rng.randrange(len(data))
                        data = data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]
                    case 1:
                        data = data[: self.rng.randrange(len(data) + 1)] + self.rng.randbytes(self.rng.randrange(9))
                length = room = len(data)
                out.append((ctypes.c_uint8 * max(1, length))(*data))
            elif kind == "char":
                known = (self.path, self.path, b"stub:", b"stub:n_vocab=1", os.fsencode(__file__)) if name == "path" else TEXTS.get(name, TEXTS["text"])
                text = self.rng.choice(known) if self.rng.random() < 0.8 else self.rng.choice((self.rng.randbytes(self.rng.randrange(40)), self.rng.choice(TEXTS["gbnf"])))
                length = len(text)
                out.append(text.ljust(ROOM, self.rng.choice((b" ", b"\0", b"x"))))
            else:
                out.append(self.structs(kind) if kind in self.fields else self.array(kind, ROOM * ROOM if ctype == "float*" else ROOM, name))  # rows of logits may go there
        return out

    # ------------------------------------------------------------------------------------------------------------ calls

    @staticmethod
    def shown(argument: Any) -> Any:
        if isinstance(argument, ctypes.Array):
            return [{f[0]: getattr(item, f[0]) for f in item._fields_} if isinstance(item, ctypes.Structure) else item for item in argument[:3]]
        return argument

    def call(self, name: str, *arguments: Any) -> int:
        line = f"{name}({', '.join(repr(self.shown(argument)) for argument in arguments)})"
        os.pwrite(self.last, line.encode().ljust(4096)[:4096], 0)
        result = getattr(self.lib, name)(*arguments)
        function = self.functions[name]
        for (ctype, _), argument in zip(function.params, arguments, strict=True):
            if ctype.endswith("**") and argument is not None and argument[0].value:
                if ctype == "pyl_text**":
                    text = ctypes.string_at(self.lib.pyl_text_data(argument[0]), self.lib.pyl_text_size(argument[0]))
                    if name == "pyl_branch_save":
                        self.blobs.append(text)
                    self.lib.pyl_text_free(argument[0])
                else:
                    self.handles[ctype.rstrip("*")].append(argument[0].value)
        if function.result != "int32_t" or name == "pyl_abi_version":
            self.landed[name] += 1
            return 0
        self.codes[result] += 1
        (self.refused if result else self.landed)[name] += 1
        if result:
            error = self.lib.pyl_error_last().contents
            if not (min(value for name, value in vars(capi).items() if name.startswith("E_")) <= result < 0 and result != capi.E_INTERNAL and error.code == result and error.message):
                raise AssertionError(f"{line} gave {result}: {error.message}")
        return int(result)

    def step(self) -> None:
        name = self.rng.choice(self.names)
        if name in ("pyl_store_free", "pyl_store_drain", "pyl_model_free", "pyl_embedder_free", "pyl_branch_retain_only", "pyl_branch_prune_subtree", "pyl_branch_prune_n") and self.rng.random() < 0.8:
            return  # else nothing would live long enough to be hurt
        arguments = self.arguments(self.functions[name].params)
        if self.call(name, *arguments) == 0 and name in ("pyl_branch_create", "pyl_branch_load", "pyl_branch_fork_n"):
            self.branches.setdefault(self.store, []).extend((arguments[2] or [])[: arguments[3]] if name == "pyl_branch_fork_n" else arguments[1][:1])
        self.kept.clear()

    # -------------------------------------------------------------------------------------------- what a sane caller does

    def opened(self) -> tuple[Any, Any]:
        model, store = (capi.pyl_model_p * 1)(), (capi.pyl_store_p * 1)()
        assert self.call("pyl_model_open", model, self.path, len(self.path), None) == 0
        params = (capi.pyl_store_params * 1)()
        self.lib.pyl_store_params_init(params, ctypes.sizeof(capi.pyl_store_params))
        params[0].n_ctx, params[0].n_branches, params[0].n_batch, params[0].n_threads = 512, 8, 32, 1
        assert self.call("pyl_dry_run", (capi.pyl_text_p * 1)(), self.path, len(self.path), None, params) == 0
        assert self.call("pyl_projector_dry_run", (capi.pyl_text_p * 1)(), b"stub:", 5, None, 0, 0, 1) == 0
        assert self.call("pyl_store_open", store, model[0], params) == 0
        return model[0], store[0]

    def read(self, store: Any, n: int) -> int:
        out = (ctypes.c_uint64 * 1)()
        assert self.call("pyl_branch_create", store, out, 0, None, None) == 0
        run = (capi.pyl_run * 1)(capi.pyl_run(struct_size=ctypes.sizeof(capi.pyl_run), branch=out[0], n_tokens=n, tokens=(ctypes.c_int32 * n)(*range(1, n + 1))))
        assert self.call("pyl_prefill_n", store, run, 1, 0, None) == 0
        return int(out[0])

    def lay_out(self, model: Any) -> None:
        """A prompt, which chance alone seldom makes; and a projector, where the model has one without a file."""
        ids = (ctypes.c_int32 * 3)(1, 2, 3)
        part = (capi.pyl_part * 1)(capi.pyl_part(struct_size=ctypes.sizeof(capi.pyl_part), kind=capi.PART_TOKENS, tokens=ids, n=3))
        assert self.call("pyl_prompt_make", (capi.pyl_prompt_p * 1)(), model, None, part, 1, 0) == 0
        if self.path.startswith(b"stub:"):
            assert self.call("pyl_projector_open", (capi.pyl_projector_p * 1)(), model, b"stub:", 5, None) == 0

    def logits(self, store: Any, branch: int) -> list[float]:
        view = (capi.pyl_logits_view * 1)(capi.pyl_logits_view(struct_size=ctypes.sizeof(capi.pyl_logits_view)))
        assert self.call("pyl_branch_logits", store, branch, view) == 0
        return list(view[0].data[: view[0].n_vocab])

    def close(self, keep: int) -> None:
        for kind in self.handles:
            while len(self.handles[kind]) > keep:
                getattr(self.lib, f"{kind}_free")(self.handles[kind].pop(0))

    def run(self, n: int) -> None:
        model, store = self.opened()
        branch = self.read(store, 20)
        self.secret = {model.value, store.value}
        for pool in self.handles.values():
            pool.clear()
        before = self.logits(store, branch)
        for i in range(n):
            if i % 60 == 0:  # what was destroyed is planted again, what grew too large is cut
                self.close(keep=5)
                planted, opened = self.opened()
                new = opened.value
                self.branches[new] = [self.read(new, 5), self.read(new, 9)]
                self.lay_out(planted)
            self.step()
        assert self.logits(store, branch) == before, "a store that nobody named was touched"
        other = self.read(store, 20)
        for each in (branch, other):
            assert self.call("pyl_commit_n", store, (ctypes.c_uint64 * 1)(each), (ctypes.c_int32 * 1)(9), 1) == 0
        assert self.logits(store, other) == self.logits(store, branch), "two branches of the same text differ"
        self.close(keep=0)
        self.lib.pyl_store_free(store)
        self.lib.pyl_model_free(model)
        live = (capi.pyl_live * 1)(capi.pyl_live(struct_size=ctypes.sizeof(capi.pyl_live)))
        assert self.call("pyl_live_objects", live) == 0
        left = {name: getattr(live[0], name) for name, _ in live[0]._fields_ if name != "struct_size" and getattr(live[0], name)}
        assert not left, f"left behind: {left}"


def main() -> None:
    path, seed, n, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with open("/proc/self/maps", encoding="utf-8") as file:
        is_sanitised = "libasan" in file.read()
    if is_sanitised:  # its allocator wants all addresses, and dies instead of refusing
        MOSTLY["n_ctx"] = tuple(n for n in MOSTLY["n_ctx"] if not 512 < n < 2**31)
    else:  # a cache of 2^31 cells is to be refused, not granted and killed
        with open("/proc/self/statm", encoding="utf-8") as file:
            limit = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + 2**31
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    fuzz = Fuzz(path, seed, last)
    fuzz.run(n)
    print(json.dumps({"landed": fuzz.landed, "refused": fuzz.refused, "codes": fuzz.codes}))


if __name__ == "__main__":
    main()
