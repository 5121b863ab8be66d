"""Random Python programs: control flow, containers, classes, closures, generators, exceptions, side effects, tensors.

    make_program(17) -> Program whose f(t0, t1, n0, l0, d0, o0) may print, log, mutate its arguments, and raise

Names carry their kind: t tensors of shape (3,), n ints, l lists of tensors, d dicts, o objects, g functions,
s strings. A name made inside a block is used only there; a program may raise, and both runs must then raise
the same.
"""
from __future__ import annotations

import random
from typing import Final

from tests.fuzz.program import Program, Stmt

PRELUDE: Final = (
    "LOG = []\nSTATE = {'n': 0}\nSCALE = 2.0",
    """class Box:
    kind = 'box'
    weight = 0.5
    def __init__(self, value, count=1):
        self.value = value
        self.count = count
    @property
    def half(self):
        return self.value * self.weight
    def scaled(self, k, *, bias=0.0):
        return torch.tanh(self.value * k + bias)
    def bump(self):
        self.count += 1
        return self
    def __add__(self, other):
        return Box(self.value * 0.5 + other.value, self.count + other.count)
    def __call__(self, v):
        return v + self.value
    def __len__(self):
        return self.count % 5
    def __getitem__(self, i):
        return self.value[i]
    def __enter__(self):
        LOG.append('enter')
        return self.value
    def __exit__(self, kind, error, trace):
        LOG.append('exit' if kind is None else kind.__name__)
        return kind is KeyError
    def __eq__(self, other):
        return isinstance(other, Box) and self.count == other.count
    __hash__ = None""",
    """class Sub(Box):
    kind = 'sub'
    def __init__(self, value, count=3):
        super().__init__(value, count)
        self.extra = [value]
    def scaled(self, k, *, bias=1.0):
        self.extra.append(k)
        return super().scaled(k, bias=bias) - 0.25
    def __getattr__(self, name):
        if name.startswith('dyn_'):
            return len(name)
        raise AttributeError(name)""",
    """def mix(a, b=1.0, *rest, k=2, **named):
    out = torch.tanh(a * b)
    for r in rest:
        out = out + r * 0.1
    return out * k + len(named)""",
    """def walk(v, count):
    try:
        for i in range(count):
            yield v * (i + 1) * 0.5
    finally:
        LOG.append('walked')""",
    """def adder(k):
    total = k
    def inner(v):
        nonlocal total
        total += 1
        return v + total * 0.1
    return inner""",
    """def deep(v, n):
    if n <= 0:
        return v
    if n == 3:
        raise ValueError('three')
    return deep(v, n - 1) * 0.9 + n""",
    """def picky(d, key):
    try:
        return d[key]
    except KeyError as e:
        LOG.append(str(e))
        raise LookupError(f'no {key}') from e""",
)
NEW: Final[dict[str, tuple[str, ...]]] = {
    "t": (
        "torch.tanh({t} + {t})", "{t} * 0.5 - {t}", "{t} * ({n} % 4)", "torch.relu({t})", "{t}.sin() + {n}", "torch.where({t} > 0, {t}, {t} * 0.1)", "mix({t}, {t}, {t}, k={n} % 3)",
        "mix(*{l}, k=1)", "sum({l}) * 0.5", "{l}[-1] + 1", "{l}[{n} % len({l})]", "{o}.value * 0.5", "{o}.half", "{o}.scaled({n} % 3)", "{o}({t})", "{g}({t})", "{t} if {n} % 2 else -{t}",
        "torch.stack({l}).mean(0) if {l} else {t}", "max({l}, key=lambda v: {n})", "{d}.get('a', {t}) * 1.0", "deep({t}, {n} % 4)", "({o} + {o}).value", "{t}.clone().mul_(0.5)", "next(walk({t}, 2))",
        "torch.softmax({t}, 0)", "{t}[[2, 0, 1]]", "torch.cat([{t}[:1], {t}[1:]])", "[*map({g}, [{t}])][0]", "(lambda v, k={n} % 3: v * k)({t})", "picky({d}, 'a') * 1.0", "{t} + len({o})", "{t} * SCALE",
        "next(iter({l}))", "getattr({o}, 'value') + {o}.weight", "{t}.view(3, 1).expand(3, 2).sum(1) * 0.5", "F.normalize({t}, dim=0)", "{t} + float({n})", "[v for v in {l} if v is not None][0]",
    ),
    "n": (
        "({n} * 3 + 1) % 7", "{n} + 1", "len({l})", "{n} if {n} > 2 else 5", "abs({n} - 3)", "{o}.count % 6", "sum(i for i in range({n} % 5))", "max({n}, {n})", "{n} // 2 + {t}.dim()", "{t}.shape[0] - 1",
        "len({d})", "int({n} > 2) + 1", "STATE['n'] % 5", "divmod({n}, 3)[1]", "sorted([{n}, 2, 1])[1]", "len({s})", "({n} << 1) % 9", "{n} and 2", "min([{n}, 4], default=0)", "len({o})", "{o}.dyn_ab if hasattr({o}, 'dyn_ab') else 1",
        "isinstance({o}, Sub) + 1", "len({{{n}, 2, 3}})", "-(-{n} // 2)", "len(list(filter(lambda q: q % 2, range({n} % 6))))",
    ),
    "l": (
        "[{t}, {t} + 1]", "[v * 0.5 for v in {l}]", "list(walk({t}, {n} % 4))", "{l} + [{t}]", "{l}[::-1]", "[a + b for a, b in zip({l}, {l})]", "list(reversed({l}))", "{l}[:{n} % 3]", "[{t} for i in range({n} % 3) if i != 1]",
        "[*{l}, {o}.value]", "list({d2}.values())", "[v for row in [{l}, {l}] for v in row][:4]", "list(map(lambda v: v - 1, {l}))", "{l}.copy()", "{l} * 1",
    ),
    "d": ("{{'a': {t}, 'b': {t} * 2}}", "{{**{d}, 'c': {t}}}", "dict(zip('abc', {l}))", "{{k: v for k, v in {d}.items()}}", "{d} | {{'z': {t}}}", "dict(a={t})", "{{str(i): v for i, v in enumerate({l})}}"),
    "o": ("Box({t}, {n})", "Sub({t})", "{o} + {o}", "{o}.bump()", "Sub({o}.value, count={n} % 4)", "({o} if {n} > 2 else Box({t}))", "{o}"),
    "g": ("lambda v: v * 0.5 + {t}", "adder({n})", "{o}", "(lambda k: lambda v: v + k)({n} % 5)", "mix", "{o}.__call__", "(torch.sin if {n} % 2 else torch.cos)"),
    "s": ("f'{{{n}}}-{s}'[:8]", "{s}.upper()", "str({n})", "'-'.join([{s}, 'q'])", "type({o}).__name__", "{o}.kind", "{s}[1:] + 'x'", "'%d' % {n}"),
}
DO: Final = (
    "LOG.append({n})", "LOG.append({s})", "LOG.append(({t} * 2).sum())", "{l}.append({t})", "{d}['k%d' % ({n} % 3)] = {t}", "{o}.value = {o}.value * 0.5 + {t}", "{o}.count += {n}", "STATE['n'] += 1", "STATE['last'] = {s}",
    "print('at', {n})", "print({s}, {n})", "{o}.bump()", "{o}.extra_{n3} = {n}", "{d}.pop('a', None)", "{l}.insert(0, {t})", "{l}[0] = {t}", "{d}.update(m={t})", "{t}.add_(1)", "{t}[0] = {n}", "{t} = {t} * 0.5 + 1", "{n} += 1", "{t}, {t} = {t}, {t}",
    "assert {n} != 6, 'six'", "{d}.setdefault('a', {t})", "{l}.reverse()", "del {l}[:1]", "{l}.extend({l}[:1])", "{n}, {s} = 3, 'pair'", "{t} *= 0.5", "{t} = torch.clamp({t}, -3, 3)", "{l}[-1].mul_(0.5)", "Box.weight = 0.25", "global SCALE\nSCALE = 1.5",
    "{n} = {n} if (w := {n} * 2) > 4 else w", "LOG.extend(i for i in range({n} % 3))", "{o}.value.mul_(0.9)",
)
BLOCKS: Final = (
    "if {n} > 2:", "if {n} % 2 == 0:", "if {t}.sum() > 0:", "if len({l}) > 1 and {n} < 5:", "if 'a' in {d}:", "if isinstance({o}, Sub):", "if {o} == {o}:", "for i in range({n} % 4):", "for v in {l}[:3]:", "for i, v in enumerate({l}[:3]):",
    "for k, v in list({d}.items()):", "for v in walk({t}, {n} % 3):", "with {o} as v:", "with torch.no_grad():", "for a, b in zip({l}[:2], {l}):", "if not {l}:", "if (q := {n} % 3) and {s}:", "for key in sorted({d}):",
)
JUMPS: Final = ("break", "continue", "return {t}, {n}", "raise ValueError({s})", "raise KeyError('k')")


class Writer:
    """Grows one program; `scope` holds the names visible at this point, by kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made = 0

    def fill(self, template: str, scope: dict[str, list[str]]) -> str:
        """Each {kind} becomes a name of that kind, chosen anew for each place."""
        out, rest = "", template.replace("{d2}", "{d}").replace("{n3}", str(self.random.randint(0, 2)))
        while "{" in rest:
            head, _, tail = rest.partition("{")
            if tail.startswith("{"):
                out, rest = out + head + "\0", tail[1:]
                continue
            kind, _, rest = tail.partition("}")
            names = scope.get(kind)
            out += head + (self.random.choice(names[-4:]) if names else kind)
        return (out + rest).replace("\0", "{").replace("}}", "}")

    def statements(self, scope: dict[str, list[str]], count: int, depth: int, in_loop: bool) -> list[Stmt]:
        made: list[Stmt] = []
        for _ in range(count):
            roll = self.random.random()
            if roll < 0.42:
                kind = self.random.choices("tnldogs", (40, 12, 12, 7, 9, 8, 5))[0]
                text = self.fill(self.random.choice(NEW[kind]), scope)
                self.made += 1
                name = f"{kind}{self.made + 1}"
                made.append(Stmt(f"{name} = {text}"))
                scope[kind] = [*scope[kind], name]
            elif roll < 0.74 or depth >= 3:
                made.append(self.action(scope))
            else:
                made += self.block(scope, depth, in_loop)
        return made

    def action(self, scope: dict[str, list[str]]) -> Stmt:
        text = self.fill(self.random.choice(DO), scope)
        return Stmt("LOG.append(SCALE)") if text.startswith("global") else Stmt(text)

    def block(self, scope: dict[str, list[str]], depth: int, in_loop: bool) -> list[Stmt]:
        if self.random.random() < 0.2:
            return self.attempt(scope, depth, in_loop)
        head = self.fill(self.random.choice(BLOCKS), scope)
        loops = head.startswith("for")
        inner = {kind: list(names) for kind, names in scope.items()}
        if "v in" in head and ("{d}" not in head) or " as v" in head:
            inner["t"].append("v")
        body = self.statements(inner, self.random.randint(1, 3), depth + 1, in_loop or loops)
        if self.random.random() < 0.15:
            body.append(self.jump(inner, in_loop or loops))
        out = [Stmt(head, tuple(body))]
        if head.startswith("if") and self.random.random() < 0.4:
            other = {kind: list(names) for kind, names in scope.items()}
            out.append(Stmt("else:", tuple(self.statements(other, self.random.randint(1, 2), depth + 1, in_loop))))
        return out

    def jump(self, scope: dict[str, list[str]], in_loop: bool) -> Stmt:
        text = self.random.choice(JUMPS)
        if text in ("break", "continue") and not in_loop:
            text = "return {t}, {n}"
        return Stmt(self.fill(text, scope))

    def attempt(self, scope: dict[str, list[str]], depth: int, in_loop: bool) -> list[Stmt]:
        """A try statement, as one tree so that shrinking keeps it whole."""
        parts = []
        for head in ("try:", "except (ValueError, LookupError) as e:", "finally:"):
            inner = {kind: list(names) for kind, names in scope.items()}
            body = self.statements(inner, self.random.randint(1, 2), depth + 1, False if head == "finally:" else in_loop)
            if head == "try:" and self.random.random() < 0.5:
                body.append(Stmt(self.fill("raise ValueError({s})", inner)))
            if head.startswith("except"):
                body.append(Stmt("LOG.append(str(e))"))
            parts.append(Stmt(head, tuple(body)))
        text = "\n".join(line for part in parts for line in part.lines(0))
        return [Stmt(text)]


def make_program(seed: int) -> Program:
    writer = Writer(seed)
    scope = {"t": ["t0", "t1"], "n": ["n0"], "l": ["l0"], "d": ["d0"], "o": ["o0"], "g": ["g0"], "s": ["s0"]}
    body = writer.statements(scope, writer.random.randint(3, 10), 0, False)
    picked = [writer.random.choice(scope[kind][-3:]) for kind in writer.random.sample("tnldos", 4)]
    returns = tuple(dict.fromkeys([scope["t"][-1], *picked]))
    inputs = ("torch.randn(3)", "torch.randn(3)", "n", "[torch.ones(3), torch.arange(3.0)]", "{'a': torch.ones(3), 'q': torch.zeros(3)}",
              f"{writer.random.choice(('Box', 'Sub'))}(torch.randn(3), 2)", "adder(2)", "'name'")
    sizes = tuple(writer.random.choice(((1, 1, 4), (2, 3, 2), (5, 5), (3, 0, 6, 2))))
    return Program(seed, tuple(Stmt(text) for text in PRELUDE), sizes, ("t0", "t1", "n0", "l0", "d0", "o0", "g0", "s0"), inputs, tuple(body), returns)
