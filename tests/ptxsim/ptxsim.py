"""A PTX interpreter: runs what the CUDA compiler emitted on the CPU, for tests without a GPU.

Vectorised with numpy over all threads of a grid. It is stricter than a chip: accesses are checked
for bounds, alignment and read-only memory, the writes to each byte are counted, asynchronous copies
arrive as late as they may, and threads that wait for ever are an error. An instruction it does not
know raises when it is executed.

    sim = PtxSim(open("k.ptx").read())
    a = sim.mem.put(np_array)                     # device address of a copy
    sim.launch("kernel", grid=4, block=128, args=[a, np.int32(7)])
    out = sim.mem.get(a, np_array.nbytes)
"""

# One-letter names follow the PTX manual's operands; closures per instruction are the point.
# ruff: noqa: E741, B905, B023, E731, C408, RUF005, UP031, B007
import random
import re

import numpy as np

HEAP, SHARED, LOCAL, PARAM = 0x7F0000000000, 0x7E0000000000, 0x7D0000000000, 0x7C0000000000
GUARD = 512
U = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
S = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
TYPES = {f"{k}{8 * w}": (U if k in "ub" else S)[w] for k in "ubs" for w in (1, 2, 4, 8)}
TYPES.update(f32=np.float32, f64=np.float64, f16=np.float16, pred=np.bool_)


class PtxError(Exception):
    pass


class Memory:
    """One flat heap of bytes with guard bytes between the allocations."""

    def __init__(self, size=1 << 20):
        self.data, self.ok = (
            np.zeros(size, np.uint8),
            np.zeros(size, np.uint8),
        )  # ok: 0 no memory, 1 read-only, 2 read-write
        self.writes = np.zeros(size, np.uint16)
        self.top = GUARD

    def alloc(self, n, readonly=False, align=256, skew=0):
        start = -(-self.top // align) * align + skew
        while start + n + 2 * GUARD > self.data.size:
            for f in ("data", "ok", "writes"):
                old = getattr(self, f)
                new = np.zeros(2 * old.size, old.dtype)
                new[: old.size] = old
                setattr(self, f, new)
        self.ok[start : start + n] = 1 if readonly else 2
        self.top = start + n + GUARD
        return HEAP + start

    def put(self, a, **kw):
        b = np.ascontiguousarray(a).view(np.uint8).reshape(-1)
        p = self.alloc(b.size, **kw)
        self.data[p - HEAP : p - HEAP + b.size] = b
        return p

    def get(self, p, n):
        return self.data[p - HEAP : p - HEAP + n].copy()

    def write_counts(self, p, n):
        return self.writes[p - HEAP : p - HEAP + n].copy()


class Instr:
    __slots__ = ("args", "fn", "mods", "neg", "op", "pred", "text")


class Kernel:
    def __init__(self, name):
        self.name, self.params, self.regs, self.code, self.labels = name, {}, {}, [], {}
        self.psize, self.shared, self.ssize, self.local, self.lsize = 0, {}, 0, {}, 0
        self.maxntid = None


def _split(s):
    """Operands at top-level commas."""
    out, depth, cur = [], 0, ""
    for c in s:
        if c in "{[(":
            depth += 1
        if c in "}])":
            depth -= 1
        if c == "," and not depth:
            out.append(cur.strip())
            cur = ""
        else:
            cur += c
    if cur.strip():
        out.append(cur.strip())
    return out


_VAR = re.compile(
    r"\.(?P<sp>shared|local|global|const)\s+(?:\.align\s+(?P<al>\d+)\s+)?(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.v\d\s+)?\.(?P<ty>\w+)\s+(?P<name>[\w$%]+)(?P<dim>(?:\[\d*\])*)(?:\s*=\s*(?P<init>.*))?$",
    re.S,
)


class PtxSim:
    def __init__(self, text, mem=None):
        self.mem, self.kernels, self.globals, self.extern_shared, self.module_shared = (
            mem or Memory(),
            {},
            {},
            {},
            {},
        )
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        text = re.sub(r"//[^\n]*", "", text)
        self.version = re.search(r"\.version\s+([\d.]+)", text)[1]
        self.target = re.search(r"\.target\s+([^\n]+)", text)[1].strip()
        pos = 0
        pat = re.compile(
            r"\.entry\s+([\w$]+)|((?:\.visible\s+|\.extern\s+|\.weak\s+)*\.(?:shared|global|const)\s[^;]*);|\.func\b"
        )
        while m := pat.search(text, pos):
            if m[1]:
                k = Kernel(m[1])
                pos = self._params(k, text, m.end())
                b = text.index("{", pos)
                k.maxntid = re.search(r"\.maxntid\s+([\d, ]+)", text[pos:b])
                pos = self._body(k, text, b)
                self.kernels[k.name] = k
            elif m[2]:
                self._var(
                    None,
                    re.sub(r"^((\.visible|\.extern|\.weak)\s+)+", "", m[2].strip()),
                    ".extern" in m[2],
                )
                pos = m.end()
            else:  # a .func: skipped (the compiler inlines what a copy kernel calls)
                semi, brace = text.find(";", m.end()), text.find("{", m.end())
                pos = m.end() if brace < 0 or 0 <= semi < brace else self._close(text, brace)

    @staticmethod
    def _close(text, i):
        depth = 0
        for j in range(i, len(text)):
            depth += {"{": 1, "}": -1}.get(text[j], 0)
            if not depth:
                return j + 1
        raise PtxError("unbalanced braces")

    def _params(self, k, text, pos):
        a = text.index("(", pos)
        b = text.index(")", a)
        for p in filter(None, (x.strip() for x in text[a + 1 : b].split(","))):
            m = re.match(
                r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[.\w\s]*?)?\s+([\w$]+)(?:\[(\d+)\])?$",
                p,
            )
            size = np.dtype(TYPES[m[2]]).itemsize
            al, n = int(m[1] or size), size * int(m[4] or 1)
            off = -(-k.psize // al) * al
            k.params[m[3]] = (off, n)
            k.psize = off + n
        return b + 1

    def _var(self, k, s, extern=False):
        m = _VAR.match(s)
        if not m:
            raise PtxError("declaration not understood: " + s)
        w = np.dtype(TYPES[m["ty"]]).itemsize
        al, n = int(m["al"] or w), w
        for d in re.findall(r"\[(\d*)\]", m["dim"]):
            n *= int(d or 0)
        if m["sp"] in ("global", "const"):
            p = self.mem.alloc(n, readonly=m["sp"] == "const")
            if m["init"]:
                v = np.array(
                    [int(x, 0) for x in re.findall(r"-?\w+", m["init"])], dtype=TYPES[m["ty"]]
                )
                self.mem.data[p - HEAP : p - HEAP + v.nbytes] = v.view(np.uint8)
            self.globals[m["name"]] = p
        elif extern:
            self.extern_shared[m["name"]] = (al, n)
        elif (
            k is None
        ):  # shared memory declared outside the kernels belongs to the kernels that name it
            self.module_shared[m["name"]] = (al, n)
        else:
            tab, fld = (k.shared, "ssize") if m["sp"] == "shared" else (k.local, "lsize")
            off = -(-getattr(k, fld) // al) * al
            tab[m["name"]] = off
            setattr(k, fld, off + n)

    def _body(self, k, text, pos):
        scopes, n, items = [], 0, []
        lab = re.compile(r"\s*([\w$%]+)\s*:(?!:)")
        while True:
            while text[pos].isspace():
                pos += 1
            if text[pos] == "{":
                scopes.append({})
                n += 1
                scopes[-1][None] = n
                pos += 1
            elif text[pos] == "}":
                sc = scopes.pop()
                pos += 1
                if not scopes:
                    break
            elif m := lab.match(text, pos):
                nm = m[1] if len(scopes) == 1 else f"{m[1]}#{scopes[-1][None]}"
                scopes[-1][m[1]] = nm
                k.labels[nm] = len(items)
                pos = m.end()
            else:
                e = text.index(";", pos)
                s = " ".join(text[pos:e].split())
                pos = e + 1
                if s.startswith(".reg"):
                    m = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", s)
                    for r in m[2].split(","):
                        r = r.strip()
                        ty = np.dtype(TYPES[m[1]])
                        u = np.bool_ if m[1] == "pred" else U[ty.itemsize]
                        if q := re.match(r"([\w$%]+)<(\d+)>$", r):
                            for i in range(int(q[2])):
                                k.regs[f"{q[1]}{i}"] = u
                        else:
                            nm = r if len(scopes) == 1 else f"{r}#{scopes[-1][None]}"
                            scopes[-1][r] = nm
                            k.regs[nm] = u
                elif re.match(r"\.(shared|local|global|const)\b", s):
                    self._var(k, s)
                elif s.startswith("."):
                    if not s.startswith((".param", ".pragma", ".loc", ".file", ".branchtargets")):
                        raise PtxError("directive not understood: " + s)
                else:
                    items.append((s, list(scopes)))
        names = {x for s, _ in items for x in re.findall(r"[A-Za-z_$%][\w$]*", s)}
        for nm, (al, size) in self.module_shared.items():
            if nm in names:
                k.shared[nm] = -(-k.ssize // al) * al
                k.ssize = k.shared[nm] + size
        for s, sc in items:  # names of inner scopes are known only now
            i = Instr()
            i.text = s
            m = re.match(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)$", s)
            res = lambda t: next((x[t] for x in reversed(sc) if t in x), t)
            i.neg, i.pred = m[1] == "!", m[2] and res(m[2])
            parts = m[3].replace("::", "@").split(".")
            i.op, i.mods = parts[0], parts[1:]
            i.args = [re.sub(r"[A-Za-z_$%][\w$]*", lambda q: res(q[0]), a) for a in _split(m[4])]
            k.code.append(i)
        end = Instr()
        end.op, end.mods, end.args, end.pred, end.neg, end.text = (
            "exit",
            [],
            [],
            None,
            False,
            "exit",
        )
        k.code.append(end)
        return pos

    def find(self, name):
        hits = [k for n, k in self.kernels.items() if n == name] or [
            k for n, k in self.kernels.items() if name in n
        ]
        if len(hits) != 1:
            raise PtxError(f"{len(hits)} kernels match {name}: {list(self.kernels)}")
        return hits[0]

    def launch(
        self, name, grid, block, args, shared=0, seed=None, lazy_async=True, max_steps=10**7
    ):
        k = self.find(name)
        buf = np.zeros(-(-max(k.psize, 1) // 16) * 16, np.uint8)  # viewed at every width
        if len(args) != len(k.params):
            raise PtxError(f"{k.name} takes {len(k.params)} parameters, got {len(args)}")
        for v, (off, n) in zip(args, k.params.values()):
            b = np.frombuffer(
                v if isinstance(v, bytes) else int(v).to_bytes(8, "little", signed=int(v) < 0),
                np.uint8,
            )
            buf[off : off + n] = b[:n]
        t3 = lambda v: tuple(v) + (1,) * (3 - len(v)) if isinstance(v, (tuple, list)) else (v, 1, 1)
        run = Run(self, k, t3(grid), t3(block), buf, shared, seed, lazy_async)
        run.go(max_steps)
        return run


CMP = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
RUN, WAIT_WARP, WAIT_BAR, DONE = 0, 1, 2, 3


class Run:
    """One launch. Registers are arrays with one element per thread of the grid."""

    def __init__(self, sim, k, grid, block, params, dyn, seed, lazy):
        self.sim, self.k, self.mem, self.params, self.lazy = sim, k, sim.mem, params, lazy
        self.rng = random.Random(seed) if seed is not None else None
        bt, nb = block[0] * block[1] * block[2], grid[0] * grid[1] * grid[2]
        if not 1 <= bt <= 1024:
            raise PtxError("a block of %d threads" % bt)
        self.N, self.bt, self.nb = bt * nb, bt, nb
        t = np.arange(self.N, dtype=np.int64)
        self.blk, self.tid = t // bt, t % bt
        self.warp = self.blk * (-(-bt // 32)) + self.tid // 32
        self.lane = self.tid % 32
        u = np.uint32
        b3, g3 = block, grid
        sp = {
            "%tid.x": self.tid % b3[0],
            "%tid.y": self.tid // b3[0] % b3[1],
            "%tid.z": self.tid // (b3[0] * b3[1]),
            "%ctaid.x": self.blk % g3[0],
            "%ctaid.y": self.blk // g3[0] % g3[1],
            "%ctaid.z": self.blk // (g3[0] * g3[1]),
            "%laneid": self.lane,
            "%warpid": self.tid // 32,
        }
        for i, c in enumerate("xyz"):
            sp[f"%ntid.{c}"], sp[f"%nctaid.{c}"] = np.full(self.N, b3[i]), np.full(self.N, g3[i])
        sp = {n: v.astype(u) for n, v in sp.items()}
        for n, f in dict(
            lt=lambda l: (1 << l) - 1,
            le=lambda l: (2 << l) - 1,
            eq=lambda l: 1 << l,
            gt=lambda l: 0xFFFFFFFF & ~((2 << l) - 1),
            ge=lambda l: 0xFFFFFFFF & ~((1 << l) - 1),
        ).items():
            sp["%lanemask_" + n] = f(self.lane).astype(u)
        self.special = sp
        self.regs = {n: np.zeros(self.N, t) for n, t in k.regs.items()}
        off, base = k.ssize, {}
        for (
            n,
            (al, sz),
        ) in (
            sim.extern_shared.items()
        ):  # dynamic shared memory: all extern arrays start at one place
            base[n] = -(-off // max(al, 16)) * max(al, 16)
        self.ssize = (max(base.values()) if base else off) + dyn
        self.pitch = -(-max(self.ssize, 1) // 1024) * 1024
        self.smem = np.full(nb * self.pitch, 0xCD, np.uint8)
        self.lpitch = -(-max(k.lsize, 1) // 16) * 16
        self.lmem = np.full(self.N * self.lpitch if k.lsize else 16, 0xCD, np.uint8)
        self.shared_sym = {**k.shared, **base}
        self.pc, self.state = np.zeros(self.N, np.int64), np.zeros(self.N, np.uint8)
        self.barid, self.barcnt = np.zeros(self.N, np.int64), np.zeros(self.N, np.int64)
        self.async_open, self.async_groups = {}, {}  # per thread: cp.async copies
        self.bulk_open, self.bulk_groups = {}, {}  # per thread: bulk stores
        self.mbar, self.mbar_pending = {}, {}
        self.executed = 0
        leaders = set(k.labels.values())
        self.leader = [i in leaders for i in range(len(k.code) + 1)]
        for i in k.code:
            i.fn = self.compile(i)

    # ---- operands
    def num(self, s, dt):
        dt = np.dtype(dt)
        if s.startswith(("0f", "0F")) and len(s) == 10:
            return np.array(int(s[2:], 16), np.uint32).view(np.float32).astype(dt)
        if s.startswith(("0d", "0D")) and len(s) == 18:
            return np.array(int(s[2:], 16), np.uint64).view(np.float64).astype(dt)
        v = int(s.rstrip("U"), 0)
        if dt.kind == "f":
            return np.array(v, dt)
        return np.array(v & ((1 << 8 * dt.itemsize) - 1), U[dt.itemsize]).view(dt)

    def rd(self, s, dt):
        """A function lanes -> values of operand s as dtype dt."""
        dt = np.dtype(dt)
        r = self.regs.get(s)
        if r is None:
            r = self.special.get(s)
        if r is not None:
            if dt == np.bool_ or r.dtype == np.bool_:
                if dt != r.dtype:
                    raise PtxError("predicate used as a number: " + s)
                return lambda L: r[L]
            if r.dtype.itemsize < dt.itemsize:
                return lambda L: r[L].astype(U[dt.itemsize]).view(dt)
            if r.dtype.itemsize > dt.itemsize:
                return lambda L: r[L].astype(U[dt.itemsize]).view(dt)
            return lambda L: r[L].view(dt)
        if s in ("%clock", "%clock64", "%globaltimer"):
            return lambda L: np.full(len(L), self.executed, dt)
        if s in self.shared_sym:
            v = np.array(self.shared_sym[s], dt)
        elif s in self.k.local:
            v = np.array(self.k.local[s], dt)
        elif s in self.sim.globals:
            v = np.array(self.sim.globals[s], np.uint64).astype(dt)
        elif s in self.k.params:  # the address of a kernel parameter
            v = np.array(PARAM + self.k.params[s][0], np.uint64).astype(dt)
        elif re.match(r"-?\d|0[xXfFdD]", s):
            v = self.num(s, dt)
        elif s.startswith("%"):
            raise PtxError("special register " + s)
        else:
            raise PtxError("operand " + s)
        return lambda L: np.broadcast_to(v, (len(L),))

    def wr(self, s, dt):
        dt = np.dtype(dt)
        if s == "_":
            return lambda L, v: None
        r = self.regs[s]
        if r.dtype == np.bool_:

            def f(L, v):
                r[L] = v
        elif r.dtype.itemsize == dt.itemsize:

            def f(L, v):
                r[L] = np.asarray(v, dt).view(r.dtype)
        else:
            ext = (S if dt.kind == "i" else U)[r.dtype.itemsize]

            def f(L, v):
                r[L] = np.asarray(v, dt).astype(ext).view(r.dtype)

        return f

    # ---- memory
    def addr(self, s):
        m = re.match(r"\[\s*([^+\s\]]+?)\s*(?:\+\s*(-?\w+))?\s*\]$", s)
        off = int(m[2] or "0", 0)
        g = self.rd(
            m[1],
            np.uint64
            if m[1] not in self.regs
            else (np.uint64 if self.regs[m[1]].dtype.itemsize == 8 else np.uint32),
        )
        return lambda L: g(L).astype(np.int64) + off

    def place(self, space, a, n, L, align, write, text):
        """Byte array and byte indices for addresses a; every byte of [a, a+n) is checked."""
        if space == "generic":
            if (a >= HEAP).all():
                space = "global"
            elif ((a >= SHARED) & (a < HEAP)).all():
                space, a = "shared", a - SHARED
            elif ((a >= LOCAL) & (a < SHARED)).all():
                space, a = "local", a - LOCAL
            else:
                raise PtxError(
                    f"{text}: generic addresses of several windows: {[hex(x) for x in a[:4]]}"
                )
        if (a % align).any():
            j = np.nonzero(a % align)[0][0]
            raise PtxError(
                f"misaligned address {a[j]:#x} (needs {align}) "
                f"in block {self.blk[L[j]]} thread {self.tid[L[j]]}: {text}"
            )
        if space in ("global", "const"):
            i = a - HEAP
            bad = (i < 0) | (i + n > self.mem.ok.size)
            if not bad.any():
                need = 2 if write else 1
                bad = (self.mem.ok[i] < need) | (self.mem.ok[i + n - 1] < need)
            if bad.any():
                j = np.nonzero(bad)[0][0]
                raise PtxError(
                    f"bad {'write' if write else 'read'} of {n} bytes at {a[j]:#x} "
                    f"in block {self.blk[L[j]]} thread {self.tid[L[j]]}: {text}"
                )
            return self.mem.data, i
        if space == "shared":
            if ((a < 0) | (a + n > self.ssize)).any():
                raise PtxError(f"shared access past {self.ssize} bytes: {text}")
            return self.smem, self.blk[L] * self.pitch + a
        if space == "local":
            if ((a < 0) | (a + n > self.k.lsize)).any():
                raise PtxError(f"local access out of range: {text}")
            return self.lmem, L * self.lpitch + a
        if space == "param":
            i = a - PARAM
            if write or ((i < 0) | (i + n > self.k.psize)).any():
                raise PtxError(f"parameter access out of range: {text}")
            return self.params, i
        raise PtxError("state space " + space)

    def load(self, space, a, w, L, text, align=None):
        arr, i = self.place(space, a, w, L, align or w, False, text)
        return arr.view(U[w])[i // w]

    def store(self, space, a, v, w, L, text, align=None):
        arr, i = self.place(space, a, w, L, align or w, True, text)
        arr.view(U[w])[i // w] = v
        if arr is self.mem.data:
            c, k = (
                self.mem.writes,
                min(w, 4),
            )  # one count of 16 bits for each byte, k of them at a time
            one = {1: 1, 2: 0x10001, 4: 0x1000100010001}[k]
            for b in range(0, w, 4):
                np.add.at(c.view(U[2 * k]), (i + b) // k, one)

    def copy_bytes(self, dsp, d, ssp, s, n, lane, align, text):
        L = np.array([lane])
        a, i = self.place(ssp, np.array([s]), n, L, align, False, text)
        b, j = self.place(dsp, np.array([d]), n, L, align, True, text)
        b[j[0] : j[0] + n] = a[i[0] : i[0] + n]
        if b is self.mem.data:
            self.mem.writes[j[0] : j[0] + n] += 1

    def poison(self, d, n, lane, text):
        b, j = self.place("shared", np.array([d]), n, np.array([lane]), 1, True, text)
        b[j[0] : j[0] + n] = 0xEE

    @staticmethod
    def space(mods):
        for m in mods:
            b = m.split("@")[0]
            if b in ("global", "shared", "local", "const", "param"):
                return b
        return "generic"

    # ---- instructions: each becomes a function of the array of active threads
    def compile(self, i):
        try:
            h = getattr(self, "op_" + i.op, None)
            if h is None:
                return self.unsupported(i)
            return h(i, i.mods, i.args)
        except PtxError as e:
            return self.unsupported(i, str(e))

    def unsupported(self, i, why="not implemented"):
        def f(L):
            raise PtxError(f"{why}: {i.text}")

        return f

    def ty(self, mods):
        return TYPES[next(m for m in reversed(mods) if m in TYPES)]

    def bin(self, i, fn, dt=None):
        dt = dt or self.ty(i.mods)
        d, a, b = self.wr(i.args[0], dt), self.rd(i.args[1], dt), self.rd(i.args[2], dt)
        return lambda L: d(L, fn(a(L), b(L)))

    def op_add(self, i, m, a):
        return self.bin(i, np.add)

    def op_sub(self, i, m, a):
        return self.bin(i, np.subtract)

    def op_min(self, i, m, a):
        return self.bin(i, np.minimum)

    def op_max(self, i, m, a):
        return self.bin(i, np.maximum)

    def logic(self, i, fn):
        return self.bin(i, fn, np.bool_ if "pred" in i.mods else self.ty(i.mods))

    def op_and(self, i, m, a):
        return self.logic(i, np.bitwise_and)

    def op_or(self, i, m, a):
        return self.logic(i, np.bitwise_or)

    def op_xor(self, i, m, a):
        return self.logic(i, np.bitwise_xor)

    def un(self, i, fn, dt=None):
        dt = dt or self.ty(i.mods)
        d, a = self.wr(i.args[0], dt), self.rd(i.args[1], dt)
        return lambda L: d(L, fn(a(L)))

    def op_not(self, i, m, a):
        return self.un(
            i, np.logical_not if "pred" in m else np.invert, np.bool_ if "pred" in m else None
        )

    def op_neg(self, i, m, a):
        return self.un(i, np.negative)

    def op_abs(self, i, m, a):
        return self.un(i, np.abs)

    def op_popc(self, i, m, a):
        dt = self.ty(m)
        d, x = self.wr(a[0], np.uint32), self.rd(a[1], dt)
        return lambda L: d(L, np.array([int(v).bit_count() for v in x(L)], np.uint32))

    def op_clz(self, i, m, a):
        dt = self.ty(m)
        n = 8 * np.dtype(dt).itemsize
        d, x = self.wr(a[0], np.uint32), self.rd(a[1], U[n // 8])
        return lambda L: d(L, np.array([n - int(v).bit_length() for v in x(L)], np.uint32))

    def op_bfind(self, i, m, a):
        d, x = self.wr(a[0], np.uint32), self.rd(a[1], U[np.dtype(self.ty(m)).itemsize])
        return lambda L: d(
            L, np.array([(int(v).bit_length() - 1) & 0xFFFFFFFF for v in x(L)], np.uint32)
        )

    def op_brev(self, i, m, a):
        n = 8 * np.dtype(self.ty(m)).itemsize
        d, x = self.wr(a[0], self.ty(m)), self.rd(a[1], self.ty(m))
        return lambda L: d(
            L, np.array([int(format(int(v), f"0{n}b")[::-1], 2) for v in x(L)], self.ty(m))
        )

    def mul(self, dt, wide, hi):
        w = np.dtype(dt).itemsize
        if hi or wide:
            big = (S if np.dtype(dt).kind == "i" else U).get(2 * w)
            if big is None:  # mul.hi of 64 bits

                def f(x, y):
                    return np.array(
                        [((int(p) * int(q)) >> 64) & (2**64 - 1) for p, q in zip(x, y)], np.uint64
                    ).view(dt)

                return f, dt
            if wide:
                return (lambda x, y: x.astype(big) * y.astype(big)), big
            return (lambda x, y: ((x.astype(big) * y.astype(big)) >> big(8 * w)).astype(dt)), dt
        return np.multiply, dt

    def op_mul(self, i, m, a):
        dt = self.ty(m)
        f, out = self.mul(dt, "wide" in m, "hi" in m)
        d, x, y = self.wr(a[0], out), self.rd(a[1], dt), self.rd(a[2], dt)
        return lambda L: d(L, f(x(L), y(L)))

    def op_mad(self, i, m, a):
        dt = self.ty(m)
        f, out = self.mul(dt, "wide" in m, "hi" in m)
        d, x, y, z = self.wr(a[0], out), self.rd(a[1], dt), self.rd(a[2], dt), self.rd(a[3], out)
        return lambda L: d(L, f(x(L), y(L)) + z(L))

    op_fma = op_mad

    def op_div(self, i, m, a, rem=False):
        dt = np.dtype(self.ty(m))
        d, x, y = self.wr(a[0], dt), self.rd(a[1], dt), self.rd(a[2], dt)

        def f(L):
            p, q = x(L), y(L)
            if dt.kind == "f":
                return d(L, p / q)
            if (q == 0).any():
                raise PtxError("division by zero: " + i.text)
            if dt.kind == "u":
                return d(L, p % q if rem else p // q)
            u = U[dt.itemsize]
            up, uq = np.abs(p).view(u), np.abs(q).view(u)
            r = (up % uq if rem else up // uq).view(dt)
            neg = (p < 0) if rem else ((p < 0) != (q < 0))
            d(L, np.where(neg, -r, r))

        return f

    def op_rem(self, i, m, a):
        return self.op_div(i, m, a, True)

    def op_shl(self, i, m, a):
        return self.shift(i, m, a, True)

    def op_shr(self, i, m, a):
        return self.shift(i, m, a, False)

    def shift(self, i, m, a, left):
        dt = np.dtype(self.ty(m))
        n = 8 * dt.itemsize
        d, x, c = self.wr(a[0], dt), self.rd(a[1], dt), self.rd(a[2], np.uint32)

        def f(L):
            v, k = x(L), c(L)
            kk = np.minimum(k, n - 1).astype(dt)
            r = np.left_shift(v, kk) if left else np.right_shift(v, kk)
            over = k >= n
            if over.any():
                r = np.where(
                    over,
                    np.array(0, dt)
                    if left or dt.kind == "u"
                    else np.where(v < 0, -1, 0).astype(dt),
                    r,
                )
            d(L, r)

        return f

    def op_shf(self, i, m, a):
        d, lo, hi, c = (
            self.wr(a[0], np.uint32),
            self.rd(a[1], np.uint32),
            self.rd(a[2], np.uint32),
            self.rd(a[3], np.uint32),
        )

        def f(L):
            s = c(L).astype(np.uint64)
            s = np.minimum(s, 32) if "clamp" in m else s & np.uint64(31)
            v = (hi(L).astype(np.uint64) << np.uint64(32)) | lo(L)
            if "l" in m:  # the high word of v << s
                d(
                    L,
                    np.where(s == 32, lo(L), ((v << (s & np.uint64(31))) >> np.uint64(32))).astype(
                        np.uint32
                    ),
                )
            else:
                d(L, (v >> s).astype(np.uint32))

        return f

    def op_bfe(self, i, m, a):
        dt = np.dtype(self.ty(m))
        n = 8 * dt.itemsize
        d, x, p, l = (
            self.wr(a[0], dt),
            self.rd(a[1], U[dt.itemsize]),
            self.rd(a[2], np.uint32),
            self.rd(a[3], np.uint32),
        )

        def one(v, pos, ln):
            v, pos, ln = int(v), int(pos) & 255, int(ln) & 255
            if ln == 0:
                return 0
            if dt.kind == "i" and v >> (n - 1):
                v -= 1 << n
            r = (v >> pos) & ((1 << ln) - 1)
            if dt.kind == "i":
                sign = (v >> min(pos + ln - 1, n - 1)) & 1
                if sign:
                    r |= -1 << ln
            return r & ((1 << n) - 1)

        return lambda L: d(
            L, np.array([one(*t) for t in zip(x(L), p(L), l(L))], U[dt.itemsize]).view(dt)
        )

    def op_bfi(self, i, m, a):
        dt = self.ty(m)
        n = 8 * np.dtype(dt).itemsize
        d, x, y, p, l = (
            self.wr(a[0], dt),
            self.rd(a[1], dt),
            self.rd(a[2], dt),
            self.rd(a[3], np.uint32),
            self.rd(a[4], np.uint32),
        )

        def one(x, y, p, l):
            p, l = int(p) & 255, int(l) & 255
            mask = (((1 << l) - 1) << p) & ((1 << n) - 1)
            return (int(y) & ~mask) | ((int(x) << p) & mask)

        return lambda L: d(L, np.array([one(*t) for t in zip(x(L), y(L), p(L), l(L))], dt))

    def op_prmt(self, i, m, a):
        if len(m) != 1:
            raise PtxError("prmt mode")
        u = np.uint32
        d, x, y, c = self.wr(a[0], u), self.rd(a[1], u), self.rd(a[2], u), self.rd(a[3], u)

        def f(L):
            v = (y(L).astype(np.uint64) << np.uint64(32)) | x(L)
            s, r = c(L).astype(np.uint64), np.zeros(len(L), np.uint64)
            for k in range(4):
                n = (s >> np.uint64(4 * k)) & np.uint64(15)
                b = (v >> (np.uint64(8) * (n & np.uint64(7)))) & np.uint64(255)
                b = np.where(
                    n & np.uint64(8), np.where(b & np.uint64(128), np.uint64(255), np.uint64(0)), b
                )
                r |= b << np.uint64(8 * k)
            d(L, r.astype(u))

        return f

    def op_lop3(self, i, m, a):
        u = np.uint32
        d, x, y, z, t = (
            self.wr(a[0], u),
            self.rd(a[1], u),
            self.rd(a[2], u),
            self.rd(a[3], u),
            int(a[4], 0),
        )

        def f(L):
            p, q, r, o = x(L), y(L), z(L), np.zeros(len(L), u)
            for k in range(8):
                if t >> k & 1:
                    o |= (p if k & 4 else ~p) & (q if k & 2 else ~q) & (r if k & 1 else ~r)
            d(L, o)

        return f

    def op_mov(self, i, m, a):
        dt = self.ty(m)
        if a[0].startswith("{") or a[1].startswith("{"):
            w = np.dtype(dt).itemsize
            src, dst = _split(a[1].strip("{}")), _split(a[0].strip("{}"))
            if len(dst) > 1:
                p = w // len(dst)
                x, ds = self.rd(a[1], U[w]), [self.wr(q, U[p]) for q in dst]

                def f(L):
                    v = x(L)
                    for k, dd in enumerate(ds):
                        dd(L, (v >> U[w](8 * p * k)).astype(U[p]))

                return f
            p = w // len(src)
            d, xs = self.wr(a[0], U[w]), [self.rd(q, U[p]) for q in src]

            def f(L):
                v = np.zeros(len(L), U[w])
                for k, x in enumerate(xs):
                    v |= x(L).astype(U[w]) << U[w](8 * p * k)
                d(L, v)

            return f
        return self.un(i, lambda x: x, dt)

    def op_cvt(self, i, m, a):
        t = [x for x in m if x in TYPES]
        to, fr = np.dtype(TYPES[t[0]]), np.dtype(TYPES[t[1]])
        d, x = self.wr(a[0], to), self.rd(a[1], fr)
        sat = "sat" in m

        def f(L):
            v = x(L)
            if to.kind in "iu" and fr.kind == "f":
                v = (
                    np.rint
                    if "rni" in m
                    else np.floor
                    if "rmi" in m
                    else np.ceil
                    if "rpi" in m
                    else np.trunc
                )(v)
            elif sat and to.kind in "iu":
                lo, hi = np.iinfo(to).min, np.iinfo(to).max
                v = np.array([min(max(int(q), lo), hi) for q in v], to)
            d(L, v.astype(to))

        return f

    def op_cvta(self, i, m, a):
        sp, to = self.space(m), "to" in m
        d, x = self.wr(a[0], np.int64), self.rd(a[1], np.int64)
        k = {"shared": SHARED, "local": LOCAL}.get(sp, 0)
        return lambda L: d(L, x(L) - k if to else x(L) + k)

    def op_isspacep(self, i, m, a):
        lo, hi = {
            "shared": (SHARED, HEAP),
            "local": (LOCAL, SHARED),
            "global": (HEAP, 1 << 62),
            "const": (1, 0),
        }[self.space(m)]
        d, x = self.wr(a[0], np.bool_), self.rd(a[1], np.int64)
        return lambda L: d(L, (x(L) >= lo) & (x(L) < hi))

    def op_setp(self, i, m, a):
        dt = np.dtype(self.ty(m))
        c = m[0]
        if c in ("lo", "ls", "hi", "hs"):
            dt = np.dtype(U[dt.itemsize])
        cmp = (
            CMP[c]
            if c in CMP
            else {
                u: (lambda x, y, g=CMP[u[:-1]]: g(x, y) | np.isnan(x) | np.isnan(y))
                for u in ("equ", "neu", "ltu", "leu", "gtu", "geu")
            }[c]
        )
        dst = a[0].split("|")
        d, x, y = self.wr(dst[0], np.bool_), self.rd(a[1], dt), self.rd(a[2], dt)
        comb = next((q for q in m[1:] if q in ("and", "or", "xor")), None)
        if comb or len(dst) > 1:
            fn = {
                "and": np.logical_and,
                "or": np.logical_or,
                "xor": np.logical_xor,
                None: lambda r, p: r,
            }[comb]
            neg = comb and a[3].startswith("!")
            p = self.rd(a[3].lstrip("!"), np.bool_) if comb else (lambda L: True)
            d2 = self.wr(dst[1], np.bool_) if len(dst) > 1 else None

            def f(L):
                r, q = cmp(x(L), y(L)), p(L)
                q = np.logical_not(q) if neg else q
                d(L, fn(r, q))
                if d2:
                    d2(L, fn(~r, q))

            return f
        return lambda L: d(L, cmp(x(L), y(L)))

    def op_selp(self, i, m, a):
        dt = self.ty(m)
        d, x, y, p = (
            self.wr(a[0], dt),
            self.rd(a[1], dt),
            self.rd(a[2], dt),
            self.rd(a[3], np.bool_),
        )
        return lambda L: d(L, np.where(p(L), x(L), y(L)))

    # loads, stores, atomics
    def op_ld(self, i, m, a):
        dt = np.dtype(self.ty(m))
        w = dt.itemsize
        dst = _split(a[0].strip("{}")) if a[0].startswith("{") else [a[0]]
        vec = next((int(x[1]) for x in m if re.match(r"v[248]$", x)), 1)
        if len(dst) != vec:
            raise PtxError("vector width")
        ds = [self.wr(q, dt) for q in dst]
        if self.space(m) == "param":
            q = re.match(r"\[\s*([\w$%]+)\s*(?:\+\s*(-?\d+))?\s*\]", a[1])
            if q[1] not in self.k.params and q[1] not in self.regs:  # the result of a call
                return lambda L: [d(L, np.zeros(len(L), dt)) for d in ds] and None
        sp, ad, t = self.space(m), self.addr(a[1]), i.text

        def f(L):
            p = ad(L)
            vals = [
                self.load(sp, p + k * w, w, L, t, align=(w * vec if k == 0 else None))
                for k in range(vec)
            ]
            for d, v in zip(ds, vals):
                d(L, v.view(dt))

        return f

    op_ldu = op_ld

    def op_call(self, i, m, a):
        if "vprintf" in i.text:
            return lambda L: None
        return self.unsupported(i, "device assertion" if "__assertfail" in i.text else "call")

    def op_st(self, i, m, a):
        if self.space(m) == "param":  # an argument of a call
            return lambda L: None
        dt = np.dtype(self.ty(m))
        w = dt.itemsize
        src = _split(a[1].strip("{}")) if a[1].startswith("{") else [a[1]]
        xs = [self.rd(q, dt) for q in src]
        sp, ad, t, vec = self.space(m), self.addr(a[0]), i.text, len(src)

        def f(L):
            p = ad(L)
            for k, x in enumerate(xs):
                self.store(
                    sp, p + k * w, x(L).view(U[w]), w, L, t, align=(w * vec if k == 0 else None)
                )

        return f

    def op_atom(self, i, m, a, red=False):
        dt = np.dtype(self.ty(m))
        w = dt.itemsize
        if red:
            a = ["_"] + a
        d, ad, xs = self.wr(a[0], dt), self.addr(a[1]), [self.rd(q, dt) for q in a[2:]]
        sp, t = self.space(m), i.text
        op = next(
            x
            for x in m
            if x in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
        )
        fn = {
            "add": lambda o, b: o + b,
            "min": min,
            "max": max,
            "and": lambda o, b: o & b,
            "or": lambda o, b: o | b,
            "xor": lambda o, b: o ^ b,
            "exch": lambda o, b: b,
            "inc": lambda o, b: 0 if o >= b else o + 1,
            "dec": lambda o, b: b if o == 0 or o > b else o - 1,
            "cas": lambda o, c, n: n if o == c else o,
        }[op]

        def f(L):
            arr, idx = self.place(sp, ad(L), w, L, w, True, t)
            view, vals, old = arr.view(dt), [x(L) for x in xs], np.zeros(len(L), dt)
            for k in range(len(L)):
                j = idx[k] // w
                old[k] = view[j]
                r = fn(view[j].item(), *(v[k].item() for v in vals))
                view[j] = r if dt.kind == "f" else np.array(r & ((1 << 8 * w) - 1), U[w]).view(dt)
            d(L, old)

        return f

    def op_red(self, i, m, a):
        if "async" in m:
            raise PtxError("red.async")
        return self.op_atom(i, m, a, True)

    def nop(self, i, m, a):
        return lambda L: None

    op_membar = op_fence = op_nanosleep = op_prefetch = op_prefetchu = op_griddepcontrol = (
        op_setmaxnreg
    ) = op_discard = op_applypriority = nop

    def op_createpolicy(self, i, m, a):
        d = self.wr(a[0], np.uint64)
        return lambda L: d(L, np.zeros(len(L), np.uint64))

    def op_trap(self, i, m, a):
        def f(L):
            raise PtxError(f"trap in block {self.blk[L[0]]} thread {self.tid[L[0]]}")

        return f

    op_brkpt = op_trap

    # ---- asynchronous copies: performed when they are waited for (lazy_async) or at once
    def op_cp(self, i, m, a):
        t = i.text
        if "bulk" not in m:
            if "commit_group" in m:

                def f(L):
                    for l in L.tolist():
                        self.async_groups.setdefault(l, []).append(self.async_open.pop(l, []))

                return f
            if "wait_group" in m or "wait_all" in m:
                n = int(a[0]) if "wait_group" in m else 0

                def f(L):
                    for l in L.tolist():
                        if "wait_all" in m:
                            self.async_groups.setdefault(l, []).append(self.async_open.pop(l, []))
                        g = self.async_groups.get(l, [])
                        while len(g) > n:
                            for c in g.pop(0):
                                self.cp_async(*c)

                return f
            d, s, n = self.addr(a[0]), self.addr(a[1]), int(a[2])
            z = self.rd(a[3], np.uint32) if len(a) > 3 else (lambda L: np.full(len(L), n))

            def f(L):
                for l, dd, ss, zz in zip(L.tolist(), d(L).tolist(), s(L).tolist(), z(L).tolist()):
                    c = (l, dd, ss, n, zz, t)
                    if self.lazy:
                        self.poison(dd, n, l, t)
                        self.async_open.setdefault(l, []).append(c)
                    else:
                        self.cp_async(*c)

            return f
        if "commit_group" in m:

            def f(L):
                for l in L.tolist():
                    self.bulk_groups.setdefault(l, []).append(self.bulk_open.pop(l, []))

            return f
        if "wait_group" in m:
            n, read = int(a[0]), "read" in m

            def f(L):
                for l in L.tolist():
                    g = self.bulk_groups.get(l, [])
                    for grp in g[: max(0, len(g) - n)]:
                        for c in grp:
                            self.bulk_read(l, c)
                            if not read:
                                self.bulk_write(l, c)
                    if not read:
                        del g[: max(0, len(g) - n)]

            return f
        sp = [x.split("@")[0] for x in m if x.split("@")[0] in ("global", "shared")]
        d, s, n = self.addr(a[0]), self.addr(a[1]), self.rd(a[2], np.uint32)
        if sp == ["shared", "global"] and "mbarrier@complete_tx@bytes" in m:
            b = self.addr(a[3])

            def f(L):
                for l, dd, ss, nn, bb in zip(
                    L.tolist(), d(L).tolist(), s(L).tolist(), n(L).tolist(), b(L).tolist()
                ):
                    if nn % 16 or nn == 0:
                        raise PtxError(f"bulk copy of {nn} bytes: {t}")
                    key = (int(self.blk[l]), bb)
                    if key not in self.mbar:
                        raise PtxError("mbarrier not initialised: " + t)
                    self.poison(dd, nn, l, t)
                    self.mbar_pending.setdefault(key, []).append((dd, ss, nn, l, t))
                    if not self.lazy:
                        self.mbar_deliver(key)

            return f
        if sp == ["global", "shared"] and "bulk_group" in m:

            def f(L):
                for l, dd, ss, nn in zip(L.tolist(), d(L).tolist(), s(L).tolist(), n(L).tolist()):
                    if nn % 16:
                        raise PtxError(f"bulk copy of {nn} bytes: {t}")
                    c = [dd, ss, nn, t, None, False]
                    if not self.lazy:
                        self.bulk_read(l, c)
                        self.bulk_write(l, c)
                    self.bulk_open.setdefault(l, []).append(c)

            return f
        raise PtxError("cp form")

    def cp_async(self, l, d, s, n, z, t):
        if z:
            self.copy_bytes("shared", d, "global", s, z, l, z if z in (4, 8, 16) else 4, t)
        arr, j = self.place("shared", np.array([d]), n, np.array([l]), n, True, t)
        arr[j[0] + z : j[0] + n] = 0

    def bulk_read(self, l, c):
        if c[4] is None:
            a, i = self.place("shared", np.array([c[1]]), c[2], np.array([l]), 16, False, c[3])
            c[4] = a[i[0] : i[0] + c[2]].copy()

    def bulk_write(self, l, c):
        if not c[5]:
            b, j = self.place("global", np.array([c[0]]), c[2], np.array([l]), 16, True, c[3])
            b[j[0] : j[0] + c[2]] = c[4]
            self.mem.writes[j[0] : j[0] + c[2]] += 1
            c[5] = True

    def mbar_deliver(self, key):
        for d, s, n, l, t in self.mbar_pending.pop(key, []):
            self.copy_bytes("shared", d, "global", s, n, l, 16, t)
            self.mbar[key]["tx"] -= n
        self.mbar_phase(key)

    def mbar_phase(self, key):
        b = self.mbar[key]
        if b["left"] == 0 and b["tx"] == 0:
            b["phase"] ^= 1
            b["left"] = b["count"]

    def op_mbarrier(self, i, m, a):
        t, kind = i.text, m[0]
        pos = next(k for k, x in enumerate(a) if x.startswith("["))
        b = self.addr(a[pos])
        key = lambda l, p: (int(self.blk[l]), p)
        if kind == "init":
            n = self.rd(a[1], np.uint32)

            def f(L):
                for l, p, c in zip(L.tolist(), b(L).tolist(), n(L).tolist()):
                    self.mbar[key(l, p)] = dict(count=c, left=c, tx=0, phase=0)

            return f
        if kind == "inval":
            return lambda L: (
                [self.mbar.pop(key(l, p)) for l, p in zip(L.tolist(), b(L).tolist())] and None
            )
        if kind in ("arrive", "expect_tx"):
            if a[0] != "_" and pos:
                raise PtxError("mbarrier state token")
            ex = "expect_tx" in m
            n = (
                self.rd(a[pos + 1], np.uint32)
                if len(a) > pos + 1
                else (lambda L: np.full(len(L), 0 if ex else 1))
            )

            def f(L):
                for l, p, v in zip(L.tolist(), b(L).tolist(), n(L).tolist()):
                    s = self.mbar[key(l, p)]
                    if ex:
                        s["tx"] += v
                    if kind == "arrive":
                        s["left"] -= 1 if ex else v
                        if s["left"] < 0:
                            raise PtxError("too many arrivals: " + t)
                    self.mbar_phase(key(l, p))

            return f
        if kind in ("try_wait", "test_wait") and "parity" in m:
            d, par = self.wr(a[0], np.bool_), self.rd(a[pos + 1], np.uint32)

            def f(L):
                for l, p, v in zip(L.tolist(), b(L).tolist(), par(L).tolist()):
                    k = key(l, p)
                    if k not in self.mbar:
                        raise PtxError("mbarrier not initialised: " + t)
                    if not (
                        self.rng and self.rng.random() < 0.5
                    ):  # with a seed the data arrive after a random delay
                        self.mbar_deliver(k)
                    d(np.array([l]), np.array([self.mbar[k]["phase"] != v]))

            return f
        raise PtxError("mbarrier form")

    # ---- warp level: executed when all the lanes of the member mask have come
    def op_shfl(self, i, m, a):
        mode, dst = m[1], a[0].split("|")
        u = np.uint32
        d, x, b, c = self.wr(dst[0], u), self.rd(a[1], u), self.rd(a[2], u), self.rd(a[3], u)
        p = self.wr(dst[1], np.bool_) if len(dst) > 1 else None
        i_mask = self.rd(a[4], u)

        def f(L):
            v, bb, cc = x(L), b(L).astype(np.int64), c(L).astype(np.int64)
            j = self.lane[L]
            cl, seg = cc & 31, (cc >> 8) & 31
            maxl, minl = (j & seg) | (cl & ~seg & 31), j & seg
            bb &= 31
            if mode == "up":
                src = j - bb
                ok = src >= maxl
            elif mode == "down":
                src = j + bb
                ok = src <= maxl
            elif mode == "bfly":
                src = j ^ bb
                ok = src <= maxl
            else:
                src = minl | (bb & ~seg & 31)
                ok = src <= maxl
            src = np.where(ok, src, j)
            at = {(int(w), int(q)): k for k, (w, q) in enumerate(zip(self.warp[L], j))}
            k = np.array([at.get((int(w), int(q)), -1) for w, q in zip(self.warp[L], src)])
            if (k < 0).any():
                raise PtxError("shuffle from a lane outside the member mask: " + i.text)
            d(L, v[k])
            if p:
                p(L, ok)

        return ("warp", i_mask, f)

    def op_vote(self, i, m, a):
        mode = m[1]
        neg = a[1].startswith("!")
        x, mask = self.rd(a[1].lstrip("!"), np.bool_), self.rd(a[2], np.uint32)
        d = self.wr(a[0], np.uint32 if mode == "ballot" else np.bool_)

        def f(L):
            v, w = x(L) != neg, self.warp[L]
            for q in np.unique(w):
                s = w == q
                r = {
                    "all": lambda: v[s].all(),
                    "any": lambda: v[s].any(),
                    "uni": lambda: v[s].all() or not v[s].any(),
                    "ballot": lambda: int((1 << self.lane[L[s]][v[s]]).sum()),
                }[mode]()
                d(L[s], np.full(s.sum(), r, np.uint32 if mode == "ballot" else np.bool_))

        return ("warp", mask, f)

    def op_elect(self, i, m, a):
        dst = a[0].split("|")
        d, p, mask = self.wr(dst[0], np.uint32), self.wr(dst[1], np.bool_), self.rd(a[1], np.uint32)

        def f(L):
            w = self.warp[L]
            for q in np.unique(w):
                s = L[w == q]
                lead = self.lane[s].min()
                d(s, np.full(len(s), lead, np.uint32))
                p(s, self.lane[s] == lead)

        return ("warp", mask, f)

    def op_activemask(self, i, m, a):
        d = self.wr(a[0], np.uint32)

        def f(L):
            w = self.warp[L]
            for q in np.unique(w):
                s = L[w == q]
                d(s, np.full(len(s), int((1 << self.lane[s]).sum()), np.uint32))

        return f

    def op_bar(self, i, m, a):
        if m[0] == "warp":
            return ("warp", self.rd(a[0], np.uint32), lambda L: None)
        if m[0] in ("sync", "cta") and "arrive" not in m and "red" not in m:
            return (
                "bar",
                self.rd(a[0] if a else "0", np.uint32),
                self.rd(a[1], np.uint32) if len(a) > 1 else None,
            )
        raise PtxError("barrier form")

    op_barrier = op_bar

    def op_bra(self, i, m, a):
        return ("bra", self.k.labels[a[0]], None)

    def op_ret(self, i, m, a):
        return ("exit", None, None)

    op_exit = op_ret

    # ---- the scheduler: all threads at one program counter run together
    def go(self, max_steps):
        old = np.seterr(over="ignore", divide="ignore", invalid="ignore")
        try:
            for _ in range(max_steps):
                r = np.nonzero(self.state == RUN)[0]
                if not len(r):
                    if (self.state == DONE).all():
                        return
                    w = np.nonzero(self.state != DONE)[0]
                    raise PtxError(
                        "deadlock: threads wait at "
                        + "; ".join(
                            f"{self.k.code[p].text} ({int((self.pc[w] == p).sum())} threads)"
                            for p in np.unique(self.pc[w])
                        )
                    )
                pcs = self.pc[r]
                p = (
                    int(pcs.min())
                    if self.rng is None
                    else int(self.rng.choice(np.unique(pcs).tolist()))
                )
                L = r[pcs == p]
                if self.rng is not None and self.rng.random() < 0.5:  # a random part of the warps
                    w = np.unique(self.warp[L])
                    keep = np.array([q for q in w if self.rng.random() < 0.5] or [w[0]])
                    L = L[np.isin(self.warp[L], keep)]
                self.block(p, L)
            raise PtxError("step limit")
        finally:
            np.seterr(**old)

    def block(self, p, L):
        code = self.k.code
        while True:
            i = code[p]
            self.executed += len(L)
            A = L
            if i.pred:
                A = L[self.regs[i.pred][L] != i.neg]
            fn = i.fn
            if type(fn) is tuple:
                kind, x, y = fn
                self.pc[L] = p + 1
                if not len(A):
                    return
                if kind == "bra":
                    self.pc[A] = x
                elif kind == "exit":
                    self.state[A] = DONE
                    for l in A.tolist():
                        if any(
                            c[4] is None for g in self.bulk_groups.get(l, []) for c in g
                        ) or self.bulk_open.get(l):
                            raise PtxError("a thread exits with bulk stores that nobody waited for")
                        for g in self.bulk_groups.get(l, []):
                            for c in g:
                                self.bulk_write(l, c)
                    self.release_bars(np.unique(self.blk[A]))
                elif kind == "warp":
                    self.pc[A], self.state[A] = p, WAIT_WARP
                    W = np.nonzero(
                        (self.state == WAIT_WARP)
                        & (self.pc == p)
                        & np.isin(self.warp, np.unique(self.warp[A]))
                    )[0]
                    mask = x(W).astype(np.int64)
                    have, gone = {}, {}
                    for w in np.unique(self.warp[W]):
                        q = W[self.warp[W] == w]
                        have[w] = int((1 << self.lane[q]).sum())
                        al = np.nonzero((self.warp == w) & (self.state == DONE))[0]
                        gone[w] = int((1 << self.lane[al]).sum())
                        full = (1 << min(32, self.bt - 32 * int(self.tid[q[0]] // 32))) - 1
                        if (mask[self.warp[W] == w] & gone[w]).any():
                            raise PtxError("member mask names threads that have exited: " + i.text)
                        mask[self.warp[W] == w] &= full
                    go = np.array([(have[w] & mk) == mk for w, mk in zip(self.warp[W], mask)])
                    if go.any():
                        G = W[go]
                        y(G)
                        self.state[G], self.pc[G] = RUN, p + 1
                else:  # bar
                    self.pc[A], self.state[A], self.barid[A] = p, WAIT_BAR, x(A)
                    self.barcnt[A] = y(A) if y else 0
                    self.release_bars(np.unique(self.blk[A]))
                return
            if len(A):
                fn(A)
            p += 1
            if self.leader[p]:
                self.pc[L] = p
                return

    def release_bars(self, blocks):
        for b in blocks.tolist():
            T = slice(b * self.bt, (b + 1) * self.bt)
            st = self.state[T]
            wait = np.nonzero(st == WAIT_BAR)[0] + b * self.bt
            for bid in np.unique(self.barid[wait]):
                q = wait[self.barid[wait] == bid]
                need = int(self.barcnt[q[0]]) or int((st != DONE).sum())
                if len(q) == need:
                    self.state[q] = RUN
                    self.pc[q] += 1
