"""Random Python programs: control flow, containers, classes, closures, generators, exceptions, side effects, tensors.

    make_program(17) -> Program whose f(t0, t1, n0, l0, d0, o0) may print, log, mutate its arguments, and raise

Names carry their kind: t tensors of shape (3,), n ints, l lists of tensors, d dicts, o objects, g functions,
s strings, u sets of ints. A name made inside a block is used only there; a program may raise, and both runs must then raise
the same.
"""
from __future__ import annotations

import random
from typing import Final

from tests.fuzz.program import Program, Stmt

PRELUDE: Final = (
    "import collections\nimport contextlib\nimport dataclasses\nimport enum\nimport functools\nimport itertools\nimport math\nimport operator",
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
    """class Oops(ValueError):
    def __init__(self, text, code=7):
        super().__init__(text)
        self.code = code""",
    """@contextlib.contextmanager
def noted(word, value):
    LOG.append('in ' + word)
    try:
        yield value * 0.5
    except KeyError:
        LOG.append('swallowed')
    finally:
        LOG.append('out ' + word)""",
    """class Deeper:
    def __enter__(self):
        STATE['depth'] = STATE.get('depth', 0) + 1
        return self
    def __exit__(self, *exc):
        STATE['depth'] -= 1
        return exc[0] is not None and issubclass(exc[0], (Oops, IndexError))""",
    """def talk(v):
    got = yield v
    while got is not None:
        got = yield v * got
    return v + 100""",
    """def both(v, n):
    last = yield from walk(v, n)
    yield v
    LOG.append(last)""",
    """def chatter(v):
    print('chat', tuple(v.shape))
    return v + 1""",
    """def peek(v):
    return int(v.sum().item() * 2 + 0.37) % 3""",
    """def guarded(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        LOG.append(fn.__name__)
        try:
            return fn(*args, **kwargs)
        finally:
            LOG.append(len(args))
    return inner
@guarded
def smooth(v, *more, power=2, **rest):
    return (v / 2) ** power + sum(more) + len(rest)""",
    """def remember(v, seen=[]):
    seen.append(1)
    return v * (len(seen) % 3)""",
    """@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: int = 2
    tags: list = dataclasses.field(default_factory=list)
    def move(self, by):
        self.tags.append(by)
        return dataclasses.replace(self, x=self.x + by)""",
    "class Color(enum.Enum):\n    RED = 1\n    BLUE = 2\nPair = collections.namedtuple('Pair', 'a b')",
    """class Steps:
    def __init__(self, v, n):
        self.v, self.left = v, n
    def __iter__(self):
        return self
    def __next__(self):
        if self.left <= 0:
            raise StopIteration
        self.left -= 1
        self.v = self.v * 0.5
        return self.v""",
    """def classify(thing):
    match thing:
        case 0 | 1:
            return 5
        case int(k) if k > 4:
            return k - 4
        case [first, *rest]:
            return len(rest)
        case {'a': _}:
            return 2
        case Point(y=2):
            return 3
        case _:
            return 1""",
)
NEW: Final[dict[str, tuple[str, ...]]] = {
    "t": (
        "torch.tanh({t} + {t})", "{t} * 0.5 - {t}", "{t} * ({n} % 4)", "torch.relu({t})", "{t}.sin() + {n}", "torch.where({t} > 0, {t}, {t} * 0.1)", "mix({t}, {t}, {t}, k={n} % 3)",
        "mix(*{l}, k=1)", "sum({l}) * 0.5", "{l}[-1] + 1", "{l}[{n} % len({l})]", "{o}.value * 0.5", "{o}.half", "{o}.scaled({n} % 3)", "{o}({t})", "{g}({t})", "{t} if {n} % 2 else -{t}",
        "torch.stack({l}).mean(0) if {l} else {t}", "max({l}, key=lambda v: {n})", "{d}.get('a', {t}) * 1.0", "deep({t}, {n} % 4)", "({o} + {o}).value", "{t}.clone().mul_(0.5)", "next(walk({t}, 2))",
        "torch.softmax({t}, 0)", "{t}[[2, 0, 1]]", "torch.cat([{t}[:1], {t}[1:]])", "[*map({g}, [{t}])][0]", "(lambda v, k={n} % 3: v * k)({t})", "picky({d}, 'a') * 1.0", "{t} + len({o})", "{t} * SCALE",
        "next(iter({l}))", "getattr({o}, 'value') + {o}.weight", "{t}.view(3, 1).expand(3, 2).sum(1) * 0.5", "F.normalize({t}, dim=0)", "{t} + float({n})", "[v for v in {l} if v is not None][0]",
        "smooth({t}, {t}, power={n} % 3)", "smooth(*{l}[:2], z={n})", "chatter({t})", "{t} * peek({t})", "Point({t}, {n}).move({n}).x", "Pair({t}, {n}).a + Pair({t}, b=1).b",
        "functools.reduce(lambda a, b: a + b, {l}, {t})", "functools.partial(mix, k={n} % 3)({t}, {t})", "next(itertools.chain({l}, [{t}]))",
        "list(itertools.accumulate({l}, initial={t}))[-1]", "remember({t})", "[*talk({t})][0]", "(lambda *a, **k: a[0] * len(a) + len(k))({t}, *{l}, z=1)",
        "torch.stack([v for v in both({t}, {n} % 3)]).sum(0)", "{d}[max({d})] if {d} else {t}", "{t} + {t}.sum().item()", "{t} * float({t}.max())", "{t} + classify({n})",
        "Color({n} % 2 + 1).value * {t}", "operator.add({t}, {t})", "{t} if {n} in {u} else {t} - 1", "sum(v * i for i, v in enumerate({l})) + {t}",
        "[[v + j for j in range(2)] for v in {l}][-1][0]", "(h := lambda q: q * 2)({t})", "torch.from_numpy({t}.detach().numpy() + 1)", "{t} + classify({d})", "{t} * classify({l})",
        "{t} + math.sqrt({n} + 1)", "torch.tensor({t}.tolist()) * 2", "{t}.new_tensor([1.0, {n}, 2])", "torch.stack([*itertools.islice(Steps({t}, 3), 2)])[-1]", "{g}({g}({t}))",
        "{t}.apply_(lambda q: q) if {n} > 90 else {t}",
    ),
    "n": (
        "({n} * 3 + 1) % 7", "{n} + 1", "len({l})", "{n} if {n} > 2 else 5", "abs({n} - 3)", "{o}.count % 6", "sum(i for i in range({n} % 5))", "max({n}, {n})", "{n} // 2 + {t}.dim()", "{t}.shape[0] - 1",
        "len({d})", "int({n} > 2) + 1", "STATE['n'] % 5", "divmod({n}, 3)[1]", "sorted([{n}, 2, 1])[1]", "len({s})", "({n} << 1) % 9", "{n} and 2", "min([{n}, 4], default=0)", "len({o})", "{o}.dyn_ab if hasattr({o}, 'dyn_ab') else 1",
        "isinstance({o}, Sub) + 1", "len({{{n}, 2, 3}})", "-(-{n} // 2)", "len(list(filter(lambda q: q % 2, range({n} % 6))))",
        "len({u})", "sum({u}) % 7", "max({u}, default=1)", "peek({t})", "classify({n})", "Color.RED.value + 1", "next((i for i in {u} if i > 1), 4)", "[{n}, 1, 2].index({n})",
        "int('1' + str({n} % 3))", "sum(1 for _ in walk({t}, {n} % 3))", "{n} if 1 < {n} <= 4 else 2", "dict.fromkeys('abab', {n})['b']", "bool({d}) + 1", "round({n} / 3)", "(not {n}) + 1",
        "(-{n}) % 5", "~{n} & 7", "len({s}.split('-'))", "{t} is {t} and 3 or 4", "math.floor({n} / 2) + 1", "functools.reduce(operator.mul, range(1, {n} % 5 + 1), 1)", "classify(Point({t}))",
        "len({{*{u}, *range(2)}})", "sum(map(len, {d}))", "{n} if {l} is {l} else 0", "all(i > 0 for i in {u}) + 1", "any([{n} > 3, {n} < 1]) + 1",
    ),
    "l": (
        "[{t}, {t} + 1]", "[v * 0.5 for v in {l}]", "list(walk({t}, {n} % 4))", "{l} + [{t}]", "{l}[::-1]", "[a + b for a, b in zip({l}, {l})]", "list(reversed({l}))", "{l}[:{n} % 3]", "[{t} for i in range({n} % 3) if i != 1]",
        "[*{l}, {o}.value]", "list({d2}.values())", "[v for row in [{l}, {l}] for v in row][:4]", "list(map(lambda v: v - 1, {l}))", "{l}.copy()", "{l} * 1",
        "[v for v in {d}.values()]", "sorted({l}, key=lambda v: {n})", "[v for i, v in enumerate({l}) if i in {u}] or [{t}]", "list(itertools.islice({l}, 2))",
        "list(itertools.chain.from_iterable([{l}, {l}]))[:3]", "[h(v) for h in [torch.sin, {g}] for v in {l}[:1]]", "[(lambda: v)() for v in {l}]",
        "[h() for h in [lambda: v + 1 for v in {l}[:2]]]", "list(both({t}, 1))", "[*{l}, *{l}][:3]", "(a := {l}[:1]) + a", "list(filter(lambda v: v is not {t}, {l}))",
        "list(collections.deque({l}, maxlen=2))", "list(Steps({t}, {n} % 3))", "[a * b.shape[0] for a, b in itertools.zip_longest({l}, {l}, fillvalue={t})]",
        "[v for v, *_ in zip({l}, range(9))]", "list(itertools.takewhile(lambda v: v.dim() == 1, {l}))", "[y for v in {l} if (y := v * 2) is not None]",
    ),
    "d": ("{{'a': {t}, 'b': {t} * 2}}", "{{**{d}, 'c': {t}}}", "dict(zip('abc', {l}))", "{{k: v for k, v in {d}.items()}}", "{d} | {{'z': {t}}}", "dict(a={t})", "{{str(i): v for i, v in enumerate({l})}}", "{{k: v for k, v in sorted({d}.items()) if k != 'a'}}", "dict({d}, extra={t})", "dict(collections.OrderedDict({d}))", "{{i: v for i, v in enumerate({l})}}", "dict(reversed({d}.items()))", "Pair({t}, {t})._asdict()", "{{k: v for d in ({d}, {d}) for k, v in d.items()}}", "{d}.copy()", "dict(filter(lambda kv: kv[0] != 'q', {d}.items()))"),
    "o": ("Box({t}, {n})", "Sub({t})", "{o} + {o}", "{o}.bump()", "Sub({o}.value, count={n} % 4)", "({o} if {n} > 2 else Box({t}))", "{o}"),
    "g": ("lambda v: v * 0.5 + {t}", "adder({n})", "{o}", "(lambda k: lambda v: v + k)({n} % 5)", "mix", "{o}.__call__", "(torch.sin if {n} % 2 else torch.cos)", "functools.partial(mix, k={n} % 3)", "guarded(lambda v: v - {t})", "(lambda v, *r, s=SCALE: v * s + len(r))", "smooth", "chatter", "operator.neg", "{o}.scaled", "[lambda v, i=i: v + i for i in range(3)][{n} % 3]", "[lambda v: v + i for i in range(3)][{n} % 3]", "(lambda f: lambda v: f(f(v)))({g})"),
    "u": ("{{{n}, 3}}", "{u} | {{{n}}}", "{u} & {{1, 2, 3}}", "{u} - {{2}}", "{{i % 3 for i in range({n} % 5)}}", "set(range({n} % 4))", "{u} ^ {{1}}", "{u}.union([4])", "{{len(str(k)) for k in {d}}}", "{u}.copy()"),
    "s": ("f'{{{n}}}-{s}'[:8]", "{s}.upper()", "str({n})", "'-'.join([{s}, 'q'])", "type({o}).__name__", "{o}.kind", "{s}[1:] + 'x'", "'%d' % {n}", "f'{{{n}:>3}}|{{{s}!r}}'[:6]", "'{{}}-{{k}}'.format({n}, k={s})[:7]", "{s}.replace('a', 'b').strip('-')", "str(Color.BLUE)[-3:]", "repr({u} and {n})", "','.join(sorted(map(str, {u})))"),
}
DO: Final = (
    "LOG.append({n})", "LOG.append({s})", "LOG.append(({t} * 2).sum())", "{l}.append({t})", "{d}['k%d' % ({n} % 3)] = {t}", "{o}.value = {o}.value * 0.5 + {t}", "{o}.count += {n}", "STATE['n'] += 1", "STATE['last'] = {s}",
    "print('at', {n})", "print({s}, {n})", "{o}.bump()", "{o}.extra_{n3} = {n}", "{d}.pop('a', None)", "{l}.insert(0, {t})", "{l}[0] = {t}", "{d}.update(m={t})", "{t}.add_(1)", "{t}[0] = {n}", "{t} = {t} * 0.5 + 1", "{n} += 1", "{t}, {t} = {t}, {t}",
    "assert {n} != 6, 'six'", "{d}.setdefault('a', {t})", "{l}.reverse()", "del {l}[:1]", "{l}.extend({l}[:1])", "{n}, {s} = 3, 'pair'", "{t} *= 0.5", "{t} = torch.clamp({t}, -3, 3)", "{l}[-1].mul_(0.5)", "Box.weight = 0.25", "global SCALE\nSCALE = 1.5",
    "{n} = {n} if (w := {n} * 2) > 4 else w", "LOG.extend(i for i in range({n} % 3))", "{o}.value.mul_(0.9)",
    "{u}.add({n})", "{u}.discard(2)", "{u}.update(range(2))", "{d}.popitem()", "{d} |= {{'w': {t}}}", "{l} += [{t}]", "{l}.pop()", "{l}.sort(key=lambda v: {n})", "{l}[1:2] = [{t}, {t}]",
    "del {d}[next(iter({d}))]", "STATE.update(k={n})", "STATE.setdefault('list', []).append({n})", "a, *b = {l}\nLOG.append(len(b))", "{t} = chatter({t})", "LOG.append(peek({t}))",
    "LOG.append({t}.sum().item() > 0)", "LOG.append(sorted({u}))", "LOG.append(f'{{{n}:03d}} {{len({l})}}')", "LOG.append([k for k in {d}])", "{n} -= 1", "setattr({o}, 'tag', {s})",
    "LOG.append(getattr({o}, 'tag', None))", "LOG.append({t} is {t})", "LOG.append(any(v is {t} for v in {l}))", "{t}, {n} = {t} + 1, {n} + 1",
    "it = talk({t})\nnext(it)\nLOG.append(it.send({n}))", "for i in range({n} % 5):\n    if i == 2:\n        LOG.append('found')\n        break\nelse:\n    LOG.append('none')",
    "q = 0\nwhile True:\n    q += 1\n    if q == 2:\n        continue\n    if q > {n}:\n        break\n    {t} = {t} * 0.5\nLOG.append(q)", "it = walk({t}, 3)\n{t} = next(it)\nit.close()",
    "del {l}[-1]", "LOG.append(list(map(type, [{n}, {s}])))", "LOG.append({u} <= {{1, 2, 3}})", "LOG.append(vars({o}).keys() - {{'value'}} == {{'count'}})", "{o}.__dict__.update(mark={n})",
    "print(*{u}, sep='-') if len({u}) < 2 else None", "LOG.append(sum(w := [i for i in range({n} % 3)]) + len(w))", "{t}.requires_grad and LOG.append('grad')",
    "LOG.append((yieldless := {n}) or 'zero')", "LOG.append(Color({n} % 2 + 1).name)", "LOG.append(Pair({n}, {s}))", "delattr({o}, 'tag') if hasattr({o}, 'tag') else None",
    "{t}.mul_(2).sub_({n})", "LOG.append({t}.shape == torch.Size([3]))",
)
BLOCKS: Final = (
    "if {n} > 2:", "if {n} % 2 == 0:", "if {t}.sum() > 0:", "if len({l}) > 1 and {n} < 5:", "if 'a' in {d}:", "if isinstance({o}, Sub):", "if {o} == {o}:", "for i in range({n} % 4):", "for v in {l}[:3]:", "for i, v in enumerate({l}[:3]):",
    "for k, v in list({d}.items()):", "for v in walk({t}, {n} % 3):", "with {o} as v:", "with torch.no_grad():", "for a, b in zip({l}[:2], {l}):", "if not {l}:", "if (q := {n} % 3) and {s}:", "for key in sorted({d}):",
    "with noted({s}, {t}) as v:", "with Deeper():", "with contextlib.suppress(ValueError, LookupError):", "with noted('a', {t}) as v, {o} as w:", "if peek({t}):", "if {t}.sum().item() > 0:",
    "for v in both({t}, 2):", "for v in Steps({t}, 2):", "for i, (k, v) in enumerate(list({d}.items())):", "for i in sorted({u}):", "if {n} in {u} or not {d}:", "for v in map({g}, {l}[:2]):",
    "for v, i in zip({l}[:3], itertools.count()):", "with torch.enable_grad():", "with Deeper(), noted('b', {t}) as v:", "if any(i > 2 for i in {u}):", "for v in reversed({l}[:2]):",
    "for i in range(3):", "if {t}.max() > {t}.min() and {n}:", "with torch.autocast('cpu', enabled=False):", "for v in (q * 2 for q in {l}[:2]):",
)
DEFS: Final = (
    "def {new}(v, k={n}):\n    return v * k + {t}", "count = {n}\ndef {new}(v):\n    nonlocal count\n    count += 1\n    return v + count", "@guarded\ndef {new}(v, *more):\n    return v - sum(more)",
    "def {new}(v):\n    try:\n        if {n} > 3:\n            raise Oops('big')\n        return v * 2\n    except Oops as e:\n        return v + e.code\n    finally:\n        LOG.append('fin')",
    "def {new}(v):\n    def gen():\n        x = v\n        for i in range(3):\n            x = x * 0.5\n            got = yield x\n            LOG.append(got)\n    it = gen()\n    next(it)\n    return it.send(5)",
    "class Local(Box):\n    def __call__(self, v):\n        return super().__call__(v) * {n}\n{new} = Local({t})", "def {new}(v):\n    return v if v.dim() == 0 else {new}(v.sum()) + v", "def {new}(v):\n    global SCALE\n    SCALE = SCALE * 0.5 + 1\n    return v * SCALE",
    "def {new}(v):\n    for i in range(3):\n        try:\n            if i == {n} % 3:\n                continue\n            if i == 2:\n                return v * i\n        finally:\n            LOG.append(i)\n    return v - 1",
    "def {new}(v):\n    print('in {new}', v.dim())\n    with noted('{new}', v) as w:\n        print('with')\n        return w + v", "def {new}(v):\n    if v.sum() > 0:\n        return v + 1\n    return v - 1", "def {new}(v, **kw):\n    kw.setdefault('k', {n})\n    return mix(v, **kw)",
    "def {new}(v):\n    out = []\n    for q in both(v, 2):\n        out.append(q)\n        if len(out) > {n}:\n            break\n    return out[-1]",
)
JUMPS: Final = ("break", "continue", "return {t}, {n}", "raise ValueError({s})", "raise KeyError('k')", "raise Oops({s}, code={n})", "raise Oops('chained') from KeyError('inner')", "raise IndexError({n})", "return {t}", "assert False, {s}")
CATCHES: Final = ("except (ValueError, LookupError) as e:", "except Oops as e:", "except Exception as e:", "except KeyError as e:")


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
            if roll < 0.03:
                self.made += 1
                name = f"g{self.made + 1}"
                made.append(Stmt(self.fill(self.random.choice(DEFS).replace("{new}", name), scope)))
                scope["g"] = [*scope["g"], name]
            elif roll < 0.44:
                kind = self.random.choices("tnldogsu", (40, 12, 12, 7, 9, 9, 5, 4))[0]
                text = self.fill(self.random.choice(NEW[kind]), scope)
                self.made += 1
                name = f"{kind}{self.made + 1}"
                made.append(Stmt(f"{name} = {text}"))
                scope[kind] = [*scope[kind], name]
            elif roll < 0.72 or depth >= 3:
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
        """A try statement: with a handler, a finally or both, perhaps an else."""
        shapes = (("try:", "except", "finally:"), ("try:", "except"), ("try:", "finally:"), ("try:", "except", "else:", "finally:"), ("try:", "except", "except"))
        parts = []
        for head in self.random.choice(shapes):
            inner = {kind: list(names) for kind, names in scope.items()}
            body = self.statements(inner, self.random.randint(1, 2), depth + 1, False if head == "finally:" else in_loop)
            if head == "try:" and self.random.random() < 0.6:
                body.append(self.jump(inner, in_loop))
            if head == "except":
                head = self.random.choice(CATCHES)
                body.append(Stmt(self.random.choice(("LOG.append(str(e))", "LOG.append(type(e).__name__)", "raise", "LOG.append(e.args)", "raise Oops('again') from e", "LOG.append(type(e.__context__).__name__)"))))
            parts.append(Stmt(head, tuple(body)))
        return parts


def make_program(seed: int) -> Program:
    writer = Writer(seed)
    scope = {"t": ["t0", "t1"], "n": ["n0"], "l": ["l0"], "d": ["d0"], "o": ["o0"], "g": ["g0"], "s": ["s0"], "u": ["u0"]}
    body = writer.statements(scope, writer.random.randint(3, 10), 0, False)
    picked = [writer.random.choice(scope[kind][-3:]) for kind in writer.random.sample("tnldosu", 4)]
    returns = tuple(dict.fromkeys([scope["t"][-1], *picked]))
    inputs = ("torch.randn(3)", writer.random.choice(("torch.randn(3)", "torch.randn(3)", "torch.randn(3, requires_grad=True)")), "n", "[torch.ones(3), torch.arange(3.0)]", "{'a': torch.ones(3), 'q': torch.zeros(3)}",
              f"{writer.random.choice(('Box', 'Sub'))}(torch.randn(3), 2)", "adder(2)", "'name'", "{1, 2, n}")
    sizes = tuple(writer.random.choice(((1, 1, 4), (2, 3, 2), (5, 5), (3, 0, 6, 2))))
    return Program(seed, tuple(Stmt(text) for text in PRELUDE), sizes, ("t0", "t1", "n0", "l0", "d0", "o0", "g0", "s0", "u0"), inputs, tuple(body), returns)
