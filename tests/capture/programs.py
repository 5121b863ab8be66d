"""Small programs of Python as people write it: (function, arguments, breaks expected).

Each is run in eager and compiled; results, mutated arguments and raised exceptions must be equal.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

PROGRAMS: list[tuple[Any, tuple[Any, ...], int]] = []


def program(*args: Any, breaks: int = 0) -> Any:
    def add(fn: Any) -> Any:
        PROGRAMS.append((fn, args, breaks))
        return fn

    return add


X = torch.arange(6.0).reshape(2, 3)
Y = torch.linspace(-1, 1, 6).reshape(2, 3)
GLOBAL_SCALE = 3
COUNTER = 0
REGISTRY: dict[str, int] = {}


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Mode(enum.IntFlag):
    A = 1
    B = 2


class Pair(NamedTuple):
    first: Any
    second: Any = 2


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    names: list[str] = dataclasses.field(default_factory=list)
    out: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: Any


class Base:
    kind = "base"

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def doubled(self) -> Any:
        return self.value * 2

    @doubled.setter
    def doubled(self, value: Any) -> None:
        self.value = value / 2

    @classmethod
    def make(cls, value: Any) -> Any:
        return cls(value)

    @staticmethod
    def helper(x: Any) -> Any:
        return x + 10

    def compute(self, x: Any) -> Any:
        return x + self.value

    def __add__(self, other: Any) -> Any:
        return type(self)(self.value + (other.value if isinstance(other, Base) else other))

    def __radd__(self, other: Any) -> Any:
        return type(self)(other + self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Base) and self.kind == other.kind

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        if i >= 3:
            raise IndexError(i)
        return self.value * i

    def __contains__(self, item: Any) -> bool:
        return item == 7

    def __call__(self, x: Any) -> Any:
        return x * self.value

    def __bool__(self) -> bool:
        return True


class Derived(Base):
    kind = "derived"

    def compute(self, x: Any) -> Any:
        return super().compute(x) * 2


class Dynamic:
    def __init__(self) -> None:
        self.known = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):
            return len(name)
        raise AttributeError(name)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Countdown:
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


class Manager:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> Any:
        self.log.append("enter")
        return self

    def __exit__(self, kind: Any, value: Any, tb: Any) -> bool:
        self.log.append("exit" if kind is None else kind.__name__)
        return kind is KeyError


class Clamp:
    """A data descriptor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = "_" + name

    def __get__(self, obj: Any, kind: Any = None) -> Any:
        return getattr(obj, self.name, 0)

    def __set__(self, obj: Any, value: int) -> None:
        setattr(obj, self.name, min(value, 5))


class Described:
    limit = Clamp()


@program(X, Y)
def arithmetic(x: Any, y: Any) -> Any:
    return (x + y - 2 * y / 3) ** 2 % 5 // 1, -x, +y, x @ y.T, abs(y), 1 - x, 2 / (x + 1)


@program(X)
def in_place(x: Any) -> Any:
    y = x.clone()
    y += 1
    y *= 2
    y[0] = 5
    y[:, 1] -= 3
    return y


@program(X)
def closures(x: Any) -> Any:
    k = 2
    fs = [lambda z, i=i: z * i + k for i in range(3)]
    k = 5
    return [f(x) for f in fs]


@program(X)
def nonlocal_counter(x: Any) -> Any:
    n = 0

    def step(z: Any) -> Any:
        nonlocal n
        n += 1
        return z + n

    return step(step(x)), n


@program(X)
def comprehensions(x: Any) -> Any:
    rows = [r.sum() for r in x if True]
    d = {i: r * i for i, r in enumerate(rows)}
    s = {i % 2 for i in range(4)}
    g = sum(r for r in rows)
    return rows, d, s, g, [a + b for a in rows for b in rows]


def numbers(n: int, x: Any) -> Any:
    for i in range(n):
        got = yield x * i
        if got:
            x = x + got
    return n


@program(X)
def generators(x: Any) -> Any:
    def outer() -> Any:
        n = yield from numbers(3, x)
        yield torch.tensor(float(n))

    g = numbers(3, x)
    first = next(g)
    second = g.send(10)
    return list(outer()), first, second, list(itertools.islice(numbers(5, x), 2))


@program(X)
def star_args(x: Any) -> Any:
    def f(a: Any, *rest: Any, k: int = 1, **named: Any) -> Any:
        return a * k + sum(rest) + sum(named.values())

    args = (1, 2)
    return f(x, *args, k=3, z=4, **{"w": 5}), f(x), f(*[x, x])


@program(X)
def strings(x: Any) -> Any:
    name = f"{x.shape[0]}-{'a':>4}-{3.14159:.2f}-{[1, 2]!r}"
    return (
        x,
        name,
        name.upper().split("-"),
        "%s %d" % ("a", 3),
        "{} {k}".format(1, k=2),
        ",".join(str(i) for i in range(3)),
    )


@program(X, Config(names=["a"]))
def dataclass_argument(x: Any, config: Any) -> Any:
    config.names.append("b")
    config.out = x * config.scale
    return dataclasses.replace(config, scale=3.0).scale + config.out, Config(1.5), Frozen(1, x)


@program(X, Pair(torch.ones(3)))
def named_tuples(x: Any, pair: Any) -> Any:
    a, b = pair
    p = Pair(x * b, second=a)
    return p, p.first, p._replace(second=1), Pair._fields, pair.first + x


@program(X, Color.RED)
def enums(x: Any, color: Any) -> Any:
    y = x + 1 if color is Color.RED else x - 1
    return y, Color["BLUE"], Color(1).name, [c.value for c in Color], Mode.A | Mode.B, color == Color.BLUE


@program(X)
def dict_methods(x: Any) -> Any:
    d = {"a": x, "b": 1}
    d.setdefault("c", []).append(x + 1)
    d.update({"e": 2}, f=3)
    popped = d.pop("b")
    e = d | {"z": 0}
    od = collections.OrderedDict(sorted(((k, i) for i, k in enumerate("cab"))))
    od.move_to_end("a")
    dd = collections.defaultdict(list)
    dd["q"].append(x)
    return (
        d,
        popped,
        e,
        list(d.items())[0][0],
        list(d.keys()),
        od,
        dd["q"][0],
        dict(zip("ab", (1, 2))),
        "a" in d,
        d.get("no", 7),
    )


@program(X)
def list_methods(x: Any) -> Any:
    a = [3, 1, 2]
    a.sort(key=lambda v: -v)
    b = sorted(a, reverse=True)
    a.insert(0, x)
    a.extend([4, 5])
    a.reverse()
    del a[0]
    c, *rest, last = a
    return a, b, a.index(1), a[1:3], rest, len(a), [1, 2] * 2 + [3], list(reversed(b)), c, last.sum()


@program(X)
def set_methods(x: Any) -> Any:
    s = {1, 2, 3}
    s.add(4)
    s.discard(1)
    return x + len(s), s & {2, 9}, s | {7}, s - {2}, s ^ {3, 5}, frozenset(s), 2 in s


@program(X)
def builtin_iteration(x: Any) -> Any:
    out = [a + b for a, b in zip(x, x)]
    out += list(map(lambda r: r * 2, x))
    out += list(filter(lambda r: True, x))
    out += [r for _, r in enumerate(x, 1)]
    return (
        out,
        any(i > 1 for i in range(3)),
        all([1, 2]),
        max(1, 2, 3),
        min([4, 2], key=lambda v: -v),
        sum([1, 2], 3),
    )


@program(X)
def functools_and_itertools(x: Any) -> Any:
    total = functools.reduce(lambda a, b: a + b, [x, x, x])
    part = functools.partial(torch.add, alpha=2)
    chained = list(itertools.chain([1], [2, 3]))
    return (total, part(x, x), chained, list(itertools.accumulate([1, 2, 3])), list(itertools.product("ab",
                                                                                                      [1])),
            [list(g) for _, g in itertools.groupby([1, 1, 2])], list(itertools.zip_longest([1], [2, 3])),
            operator.itemgetter(1)([4, 5]), functools.reduce(operator.mul, [1, 2, 3]))  # fmt: skip


@program(X)
def mathematics(x: Any) -> Any:
    return (
        x * math.sqrt(4) + math.pi,
        math.ceil(2.5),
        math.prod([2, 3]),
        divmod(7, 2),
        round(2.567, 2),
        abs(-3),
        pow(2, 5),
    )


@program(X, Base(2.0))
def user_objects(x: Any, b: Any) -> Any:
    d = Derived.make(x)
    e = b + 1
    f = 1 + b
    b.doubled = 8
    return (d.compute(x), b.compute(x), e.value, f.value, b.doubled, Base.helper(x), d.kind, len(b), b[1],
    7 in b, b(x),
            d == b, d != b, [v for v in b], bool(b), isinstance(d, Base), type(d).__name__)  # fmt: skip


@program(X)
def attribute_hooks(x: Any) -> Any:
    d = Dynamic()
    described = Described()
    described.limit = 9
    return x + d.get_abc + d.known, getattr(d, "nope", 3), hasattr(d, "nope"), described.limit


@program(X)
def slots(x: Any) -> Any:
    s = Slotted(x)
    s.b = s.a + 1
    return s.b, hasattr(s, "b"), s.a is x


@program(X)
def iterators(x: Any) -> Any:
    return (
        [x + i for i in Countdown(3)],
        sum(Countdown(4)),
        list(Countdown(2)),
        next(iter([5])),
        next(iter([]), 9),
    )


@program(X, [])
def context_managers(x: Any, log: Any) -> Any:
    with Manager(log) as m, Manager(log):
        x = x + len(m.log)
    with Manager(log):
        raise KeyError("gone")
    with contextlib.suppress(ValueError):
        raise ValueError
    with contextlib.nullcontext(3) as three:
        x = x * three
    return x


@contextlib.contextmanager
def scaled(log: list[Any], k: int) -> Any:
    log.append(k)
    try:
        yield k * 2
    finally:
        log.append(-k)


@program(X, [])
def generator_context(x: Any, log: Any) -> Any:
    with scaled(log, 3) as k:
        x = x * k
    try:
        with scaled(log, 4):
            raise ValueError("inside")
    except ValueError as error:
        log.append(str(error))
    return x


@program(X)
def exceptions(x: Any) -> Any:
    out = []
    try:
        out.append(1)
        raise ValueError("a")
    except (TypeError, ValueError) as error:
        out.append(str(error))
        x = x + 1
    else:
        out.append("else")
    finally:
        out.append("finally")
    try:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as error:
        out.append(type(error.__cause__).__name__)
    try:
        assert x.dim() == 3, "rank"
    except AssertionError as error:
        out.append(str(error))
    return x, out


@program(X)
def leaves_by_exception(x: Any) -> Any:
    y = x + 1
    raise ValueError(f"shape {tuple(y.shape)}")


@program(X, {"kind": "scale", "by": [2, 3]})
def matching(x: Any, command: Any) -> Any:
    match command:
        case {"kind": "scale", "by": [a, *rest]}:
            x = x * a + len(rest)
        case _:
            x = x - 1
    match Pair(1, 2):
        case Pair(first=1, second=s):
            x = x + s
    match 3:
        case int(n) if n > 2:
            x = x + n
    return x


@program(X)
def walrus_and_ternary(x: Any) -> Any:
    if (n := x.shape[0]) > 1:
        x = x + n
    return x if n == 2 else -x, (n and 5) or 6, not n, 1 < n < 3, n in (1, 2), n is not None


@program(X)
def loops(x: Any) -> Any:
    i = 0
    while True:
        i += 1
        if i == 2:
            continue
        if i > 4:
            break
        x = x + i
    else:
        x = x * 100
    for i in range(3):
        pass
    else:
        x = x + i
    return x


@program(X)
def global_writes(x: Any) -> Any:
    global COUNTER
    COUNTER += 1
    REGISTRY["n"] = REGISTRY.get("n", 0) + 1
    return x * GLOBAL_SCALE + COUNTER


@program([X, Y], {"a": [1]}, {1, 2})
def container_effects(xs: Any, d: Any, s: Any) -> Any:
    xs.append(xs[0] + 1)
    xs[0] = xs[1] * 2
    d["a"].append(2)
    d["b"] = xs[-1]
    s.add(3)
    del xs[1]
    return len(xs)


@program(X)
def aliasing(x: Any) -> Any:
    a = [x]
    b = [a, a]
    b[0].append(x + 1)
    return b, b[0] is b[1]


@program(X, X)
def same_argument_twice(x: Any, y: Any) -> Any:
    return x + y, x is y


@program(X)
def shapes_and_types(x: Any) -> Any:
    b, c = x.shape
    return (x.view(c, b), x.size(), x.size(0), x.dim(), x.numel(), x.dtype, x.device, x.is_floating_point(),
    x.shape[-1],
            x.new_zeros(b), torch.zeros(b, c, dtype=x.dtype), x.stride(), x.is_contiguous(), isinstance(x,
            torch.Tensor),
            type(x) is torch.Tensor, x.requires_grad, torch.is_tensor(x), len(x),
            torch.finfo(x.dtype).max)  # fmt: skip


@program(X, Y)
def torch_functions(x: Any, y: Any) -> Any:
    values, indices = x.max(dim=1)
    parts = x.split(1, dim=1)
    return (torch.cat([x, y]), torch.stack((x, y), 1), torch.where(x > 1, x, y), F.softmax(x, -1),
    F.relu(y), values, indices,
            parts, x.chunk(2), torch.einsum("ij,kj->ik", x, y), x.masked_fill(y > 0, 0.0), x[None, ..., 0],
            torch.arange(3), x.t(), x.T.contiguous(), x.sum(dim=(0, 1)), x.mean(-1, keepdim=True),
            torch.topk(x, 2).values)  # fmt: skip


@program(torch.randn(4, 3, requires_grad=True))
def grad_modes(x: Any) -> Any:
    with torch.no_grad():
        y = x * 2
    with torch.enable_grad():
        z = x * 3
    with torch.set_grad_enabled(False):
        w = x + 1
    return y, z, w, torch.is_grad_enabled(), y.requires_grad, z.requires_grad


@torch.no_grad()
def without_grad(x: Any) -> Any:
    return x * 2


@program(torch.randn(4, 3, requires_grad=True))
def grad_decorator(x: Any) -> Any:
    return without_grad(x), x.detach(), x.requires_grad


@program(torch.randn(4, 4))
def autocast(x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
    return y, x @ x


@program(X)
def copies(x: Any) -> Any:
    d = {"a": [x], "c": Config(2.0)}
    shallow, deep = copy.copy(d), copy.deepcopy(d["a"])
    d["a"].append(1)
    return shallow, deep, len(shallow["a"])


@program(X)
def functions_as_values(x: Any) -> Any:
    def apply(f: Any, *args: Any) -> Any:
        return f(*args)

    table = {"relu": torch.relu, "double": lambda z: z * 2, "neg": operator.neg}
    return [apply(f, x) for f in table.values()], apply(max, 1, 2)


@program(X)
def returns_function(x: Any) -> Any:
    y = x + 1

    def later(z: Any) -> Any:
        return y + z

    return later(x), x * 2


@program(X, breaks=1)
def prints(x: Any) -> Any:
    y = x + 1
    print("value", end="")
    return y * 2


@program(X, breaks=1)
def data_dependent_branch(x: Any) -> Any:
    y = x * 2
    if y.sum() > 3:
        return y + 1
    return y - 1


@program(X, breaks=1)
def item(x: Any) -> Any:
    n = x.sum().item()
    return x + n, n


@program(X, breaks=1)
def break_in_with(x: Any) -> Any:
    with torch.no_grad():
        y = x + 1
        print("", end="")
        y = y * 2
    return y, torch.is_grad_enabled()


@program(X, [], breaks=1)
def break_in_try(x: Any, log: Any) -> Any:
    try:
        y = x + 1
        log.append("before")
        int("no number" + str(y.sum().item()))
    except ValueError:
        log.append("caught")
        y = x * 3
    finally:
        log.append("finally")
    return y


@program(X, breaks=3)
def break_in_loop(x: Any) -> Any:
    for i in range(3):
        x = x + 1
        print(i, end="")
        x = x * 2
    return x


def inner_break(x: Any) -> Any:
    x = x + 1
    print("", end="")
    return x * 2


@program(X, breaks=2)
def break_in_callee(x: Any) -> Any:
    return inner_break(x * 3) + 1


@program(X, breaks=1)
def tolist(x: Any) -> Any:
    return [v + 1 for v in x.flatten().tolist()], x + 1


@program(X, {"seen": []}, breaks=1)
def effects_before_break(x: Any, state: Any) -> Any:
    state["seen"].append(x * 2)
    print("", end="")
    state["seen"].append(x * 3)
    state["n"] = len(state["seen"])
    return state["seen"][0] + 1


@program(torch.randn(4, 4), breaks=2)
def break_in_autocast(x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x
        print("", end="")
        z = y @ x
    return y, z, x @ x, torch.is_autocast_enabled("cpu")


@program(X, breaks=2)
def break_in_inference_mode(x: Any) -> Any:
    with torch.inference_mode():
        y = x + 1
        print("", end="")
        y = y * 2
    return torch.is_inference_mode_enabled(), y + 0


def walk(log: list[Any], x: Any) -> Any:
    try:
        yield x
        yield x * 2
    finally:
        log.append("closed")


@program(X, [])
def abandoned_generator(x: Any, log: Any) -> Any:
    y = next(walk(log, x))
    log.append("after")
    return y + 1


@program(torch.arange(3.0), 7)
def only_mutates(x: Any, n: Any) -> Any:
    x[0] = n
    return x


@program(X, torch.ones(3))
def function_transforms(x: Any, w: Any) -> Any:
    gradient = torch.func.grad(lambda t: (t**3 * w).sum())(x)
    rows = torch.func.vmap(lambda row: (row * w).sum())(x)
    both = torch.func.vmap(torch.func.grad(lambda row: (row * w).sin().sum()))(x)
    columns = torch.func.vmap(lambda a, b: a + b, in_dims=(1, None))(x, x[:, 0])
    return gradient, rows, both, columns


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@program(torch.randn(3, requires_grad=True))
def custom_function(x: Any) -> Any:
    return Cube.apply(x) + 1


@program(X)
def class_in_function(x: Any) -> Any:
    class Local:
        scale = 3

        def apply(self, z: Any) -> Any:
            return z * self.scale

    return Local().apply(x + 1)


@program(X)
def class_in_a_function_of_torch(x: Any) -> Any:
    return torch.masked.softmax(x + 1, 0, mask=x > 0), torch.masked.sum(x, 0, mask=x > 0)


@program(X, {"a": 1, "b": X})
def inner_functions_and_defaults(x: Any, options: Any) -> Any:
    def outer(a: Any, b: Any = 2, *, c: Any = None, **rest: Any) -> Any:
        def inner(z: Any = a) -> Any:
            return z + b

        return inner() + len(rest), c

    return outer(x, **options) if "z" in options else outer(x, c=options["b"], d=1)


@program(torch.ones(2, 3), [1, 2])
def exception_groups_of_flow(x: Any, xs: Any) -> Any:
    total = x
    for i in xs:
        try:
            if i == 2:
                raise KeyError(i)
            total = total + i
        except KeyError:
            total = total * 10
            continue
        finally:
            total = total + 0.5
    return total


@program(X, breaks=1)
def leaf_made_inside(x: Any) -> Any:
    t = (x * 2).requires_grad_()
    return t * 3, t.is_leaf, t.requires_grad
