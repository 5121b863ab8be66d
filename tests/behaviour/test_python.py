"""SPEC C4: Python as people write it, captured whole and equal to plain Python."""
from __future__ import annotations

import collections
import copy
import functools
import itertools
import logging
import math
import operator
import re
from typing import Any

import torch

from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case


def x4() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


@case("C4")
def class_with_parameters_called() -> Any:
    def f(x: torch.Tensor) -> Any:
        found = dict[str, Any](a=x + 1)
        half = torch.div(x.shape[0], 2, rounding_mode="floor")
        return found, list[int]((1, 2)), x[:half]

    return f, (torch.ones(4),)


@case("C4")
def arithmetic() -> Any:
    return lambda x, y: ((x + y) * 2 - x / y) ** 2 // 1 % 3, (torch.rand(4) + 1, torch.rand(4) + 1)


@case("C4")
def closure_reads() -> Any:
    scale, bias = 3.0, torch.ones(4)

    def outer(x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return y * scale + bias

        return inner(inner(x))

    return outer, (x4(),)


@case("C4")
def nonlocal_counter() -> Any:
    def f(x: torch.Tensor) -> Any:
        total = 0

        def bump(k: int) -> None:
            nonlocal total
            total += k

        for i in range(4):
            bump(i)
        return x * total, total

    return f, (x4(),)


@case("C4")
def comprehensions() -> Any:
    def f(x: torch.Tensor) -> Any:
        rows = [x * i for i in range(3) if i != 1]
        table = {str(i): r.sum() for i, r in enumerate(rows)}
        kinds = {len(str(i)) for i in range(12)}
        return rows, table, kinds, sum(r.sum() for r in rows)

    return f, (x4(),)


@case("C4")
def generator_left_in_the_middle() -> Any:
    log: list[int] = []

    def parts(t: torch.Tensor) -> Any:
        try:
            yield t + 1
            yield t + 2
        finally:
            log.append(1)

    def f(x: torch.Tensor) -> Any:
        first = parts(x)
        pairs = zip(parts(x), [1])
        log.append(2)
        return next(first), next(pairs)[0]

    return f, [(x4(),), (x4(),)], lambda: log


@case("C4")
def generator_local() -> Any:
    def f(x: torch.Tensor) -> Any:
        def halves(t: torch.Tensor) -> Any:
            for i in range(3):
                yield t / (i + 1)
            return "done"

        return list(halves(x)), sum(halves(x)), max(i for i in range(5))

    return f, (x4(),)


@case("C4")
def generator_delegation() -> Any:
    def f(x: torch.Tensor) -> Any:
        def inner() -> Any:
            yield x
            yield x + 1

        def outer() -> Any:
            yield x - 1
            yield from inner()

        return [t * 2 for t in outer()]

    return f, (x4(),)


@case("C4")
def generator_send() -> Any:
    def f(x: torch.Tensor) -> Any:
        def echo() -> Any:
            got = yield x
            while got is not None:
                got = yield got * 2

        g = echo()
        first = next(g)
        second = g.send(x + 1)
        return first, second

    return f, (x4(),)


@case("C4")
def generator_that_returns_when_a_tensor_is_sent() -> Any:
    def f(x: torch.Tensor) -> Any:
        def inner() -> Any:
            got = yield x
            return got * 2

        def outer() -> Any:
            yield (yield from inner())
            return 3

        g, h = outer(), inner()
        next(g), next(h)
        try:
            h.send(x)
        except StopIteration as stop:
            return g.send(x + 1), stop.value, next(g, None)

    return f, (x4(),)


@case("C4")
def star_arguments() -> Any:
    def g(*args: Any, k: float = 1.0, **kwargs: Any) -> Any:
        return sum(args) * k + kwargs.get("bias", 0)

    def f(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return g(x, *rest, k=2.0, **{"bias": 3, **named})

    return f, (x4(), torch.ones(4), 2.5)


@case("C3")
def argument_given_twice() -> Any:
    class Thing:
        def method(self, **named: Any) -> None: ...

    thing: Any = Thing()

    def f(x: torch.Tensor) -> Any:
        said = []
        for call in (thing.method, dict, torch.add, Thing):
            try:
                call(key=1, **{"key": x})
            except TypeError as error:
                said.append(str(error))
        return x * len(said), said

    return f, (x4(),)


@case("C4")
def keyword_only_defaults() -> Any:
    def g(x: torch.Tensor, /, y: float = 2, *, z: float = 3) -> torch.Tensor:
        return x * y + z

    return lambda x: g(x) + g(x, 1) + g(x, y=5, z=1), (x4(),)


@case("C4")
def formatted_strings() -> Any:
    def f(x: torch.Tensor) -> Any:
        name = f"{x.dim()}d-{x.shape[0]:03d}-{str(x.dtype)!r}"
        return x + len(name), name, "%s-%d" % ("a", 3), "{:>4}".format(7), "a,b".split(","), "-".join(["p", "q"])

    return f, (x4(),)


@case("C4")
def dict_methods() -> Any:
    def f(x: torch.Tensor) -> Any:
        d = {"a": x, "b": x + 1}
        d.setdefault("c", x * 2)
        d.update(e=x, f=x)
        d |= {"g": x}
        popped = d.pop("a")
        del d["b"]
        keys = list(d)
        both = {**d, "z": popped}
        return {k: v.sum() for k, v in both.items()}, keys, "c" in d, d.get("none", 5), list(d.values())[0], len(d)

    return f, (x4(),)


@case("C4", tensors=False)
def dict_order_and_views() -> Any:
    def f(x: torch.Tensor) -> Any:
        d = dict(zip("abc", (x, x + 1, x + 2), strict=True))
        d["a"] = d.pop("a")
        first = next(iter(d))
        return list(d.items())[-1][1], first, d.keys() & {"a", "q"}, list(reversed(d)), d.popitem()[0]

    return f, (x4(),)


@case("C4")
def list_methods() -> Any:
    def f(x: torch.Tensor) -> Any:
        xs = [x]
        xs.append(x + 1)
        xs.extend([x + 2, x + 3])
        xs.insert(0, x - 1)
        last = xs.pop()
        xs.reverse()
        xs[1:3] = [x * 10]
        xs += [last]
        ys = xs * 2
        nums = sorted([3, 1, 2], reverse=True, key=lambda v: -v)
        nums.sort(key=functools.cmp_to_key(lambda a, b: a - b))
        return xs, len(ys), nums, nums.index(2), nums.count(1), [1, 2] + [3], xs[-1], ys[::2]

    return f, (x4(),)


@case("C4", recompiles=1)
def patterns() -> Any:
    kind = re.compile(r"layer(\d+)\.(?P<kind>\w+)")
    seen: list[str] = []

    def note(found: Any) -> str:
        seen.append(found.group())
        return "#"

    def f(x: torch.Tensor, name: str) -> Any:
        found = kind.match(name)
        if found is None:
            return x + 1, re.split("[._]", name), re.search("z", name) is None, re.sub("n", note, name)
        return x * int(found.group(1)), found["kind"], found.span(), re.findall(r"\d", name)

    return f, [(x4(), "layer3.w"), (x4(), "none.of_these"), (x4(), "layer3.w")], lambda: seen


@case("C4")
def set_methods() -> Any:
    def f(x: torch.Tensor) -> Any:
        s = {1, 2, 3}
        s.add(4)
        s.discard(1)
        t = s | {9}
        return x * len(t - {2}), sorted(s & {2, 4}), 4 in s, s <= t, frozenset([1]) | {2}

    return f, (x4(),)


@case("C4")
def tuples_and_unpacking() -> Any:
    def f(x: torch.Tensor) -> Any:
        a, *mid, b = (x, x + 1, x + 2, x + 3)
        (c, d), e = (a, b), mid
        c, d = d, c
        return (a, b, c, d) + tuple(e), (1, 2) < (1, 3), (x,) * 2

    return f, (x4(),)


@case("C4")
def for_else_while_break() -> Any:
    def f(x: torch.Tensor) -> Any:
        for i in range(10):
            if i == 3:
                break
            if i % 2:
                continue
            x = x + i
        else:
            x = x * 100
        while True:
            i -= 1
            if i < 0:
                break
        else:
            x = x * 1000
        return x, i

    return f, (x4(),)


class Halves:
    """Refuses to be divided, but divides what does not know it."""

    def __divmod__(self, other: Any) -> Any:
        return NotImplemented

    def __rdivmod__(self, other: Any) -> Any:
        return "divides", other


@case("C4")
def sums_and_quotients_that_python_refuses() -> Any:
    def f(x: torch.Tensor) -> Any:
        said: list[Any] = [divmod(7, Halves()), sum([[1], [2]], []), sum([1, 2], start=3)]  # type: ignore[operator]
        for start in ("", b"", bytearray()):
            try:
                said.append(sum([], start))
            except TypeError as error:
                said.append(str(error))
        try:
            said.append(divmod(Halves(), Halves()))  # type: ignore[operator]
        except TypeError:
            said.append("refused")
        return x + 1, said

    return f, (x4(),)


@case("C4")
def builtin_iteration() -> Any:
    def f(x: torch.Tensor) -> Any:
        rows = list(map(lambda a, b: a * b, [x, x + 1], [2, 3]))
        kept = list(filter(None, [0, 1, 2]))
        pairs = [(i, a) for i, a in enumerate(reversed(rows), start=1)]
        return rows, kept, pairs, any(k > 1 for k in kept), all([]), max(kept), min(3, 1), abs(-2), divmod(7, 2), round(2.567, 1), pow(2, 3), list(zip(*[(1, 2), (3, 4)]))

    return f, (x4(),)


@case("C4")
def iterators_by_hand() -> Any:
    def f(x: torch.Tensor) -> Any:
        it = iter([x, x + 1, x + 2])
        first = next(it)
        rest = list(it)
        return first, rest, next(it, "end"), next(iter(range(5)))

    return f, (x4(),)


@case("C4")
def functools_partial_reduce() -> Any:
    def scale(x: torch.Tensor, k: float, b: float = 0.0) -> torch.Tensor:
        return x * k + b

    double = functools.partial(scale, k=2.0)

    def f(x: torch.Tensor) -> Any:
        local = functools.partial(double, b=1.0)
        return functools.reduce(operator.add, [local(x), double(x), x])

    return f, (x4(),)


@case("C4")
def functools_wraps_decorator() -> Any:
    def logged(g: Any) -> Any:
        @functools.wraps(g)
        def inner(*a: Any, **k: Any) -> Any:
            return g(*a, **k) * 2

        return inner

    @logged
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    return lambda x: (f(x), f.__name__), (x4(),)


@case("C4")
def variables_that_are_not_there() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        said = []
        if n:
            y = x
        for _ in range(2):
            try:
                del y
            except UnboundLocalError as error:
                said.append(str(error))
        return x * 2, said

    return f, [(torch.ones(3), 0), (torch.ones(3), 1)]


@case("C4", recompiles=1)
def tensor_of_rows_that_change() -> Any:
    def f(x: torch.Tensor, rows: Any) -> Any:
        return x * torch.tensor(rows), torch.tensor([rows, [(1, 2), (3, 4.5)]])

    return f, [(torch.ones(2, 2), [[0.1 * i, 2], (i, 0.5)]) for i in range(2, 7)]


@case("C4")
def lru_cached_call() -> Any:
    @functools.lru_cache(maxsize=None)
    def size(n: int) -> int:
        return n * 3

    return lambda x: x * size(4) + size(x.shape[0]), (x4(),)


@case("C4")
def lru_cached_warning() -> Any:
    seen: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.Logger("said once")
    logger.addHandler(Kept())

    @functools.lru_cache(None)
    def warn_once(logger: logging.Logger, text: str) -> None:
        logger.warning(text)

    def f(x: torch.Tensor) -> torch.Tensor:
        warn_once(logger, "the default is taken")
        return x * 2

    return f, [(x4(),), (x4(),)], lambda: seen


@case("C4")
def itertools_tour() -> Any:
    def f(x: torch.Tensor) -> Any:
        pieces = list(itertools.chain([x], [x + 1], itertools.repeat(x, 2)))
        grid = list(itertools.product(range(2), "ab"))
        runs = list(itertools.accumulate([1, 2, 3]))
        cut = list(itertools.islice(itertools.count(5), 3))
        both = list(itertools.zip_longest([1], [2, 3], fillvalue=0))
        return sum(pieces), grid, runs, cut, both, list(itertools.combinations(range(3), 2)), list(itertools.chain.from_iterable([[1], [2]]))

    return f, (x4(),)


@case("C4")
def operator_module() -> Any:
    def f(x: torch.Tensor) -> Any:
        get = operator.itemgetter(1)
        return operator.add(x, 1), operator.mul(x, 2), get([x, x * 5]), operator.attrgetter("ndim")(x), operator.methodcaller("sum")(x)

    return f, (x4(),)


@case("C4")
def math_module() -> Any:
    return lambda x: x * math.sqrt(x.shape[-1]) + math.floor(2.5) + math.pi + math.prod(x.shape) + math.log2(8) + math.ceil(1.2), (x4(),)


@case("C4")
def collections_module() -> Any:
    def f(x: torch.Tensor) -> Any:
        groups = collections.defaultdict(list)
        for i in range(4):
            groups[i % 2].append(x * i)
        order = collections.OrderedDict(a=x, b=x + 1)
        order.move_to_end("a")
        q = collections.deque([x, x + 1], maxlen=2)
        q.append(x + 2)
        counts = collections.Counter("abca")
        return {k: sum(v) for k, v in groups.items()}, list(order), q[0], counts["a"]

    return f, (x4(),)


@case("C4")
def walrus_and_chained_compare() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        if (m := n * 2) > 3 and 0 < n <= 5:
            x = x + m
        return x if n != 1 else -x, (not n), n or 7, n and 8

    return f, [(x4(), 2), (x4(), 1)]


@case("C4")
def type_checks() -> Any:
    def f(x: torch.Tensor, y: Any) -> Any:
        if isinstance(y, (int, float)) and not isinstance(y, bool):
            x = x + y
        elif y is None:
            x = x * 2
        elif callable(y):
            x = y(x)
        return x, type(y).__name__, issubclass(bool, int), isinstance(x, torch.Tensor), type(x) is torch.Tensor

    return f, [(torch.ones(4), 3), (torch.ones(4), None), (torch.ones(4), torch.sin)]


@case("C4")
def lambdas_in_containers() -> Any:
    table = {"relu": torch.relu, "twice": lambda t: t * 2, "gelu": torch.nn.functional.gelu}

    def f(x: torch.Tensor) -> Any:
        for name in ("relu", "twice", "gelu"):
            x = table[name](x)
        return x

    return f, (x4(),)


@case("C4")
def recursion() -> Any:
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 1 else x * power(x, n - 1)

    return lambda x: power(x, 5), (x4(),)


@case("C4", tensors=False)
def copy_module() -> Any:
    def f(x: torch.Tensor) -> Any:
        d = {"a": [x, 1], "b": 2}
        shallow, deep = copy.copy(d), copy.deepcopy({"n": [1, 2]})
        shallow["a"].append(3)
        deep["n"].append(3)
        return d, deep, [1, 2].copy()

    return f, (x4(),)


@case("C4")
def slices_and_ranges() -> Any:
    def f(x: torch.Tensor) -> Any:
        s = slice(1, None, 2)
        r = range(10, 0, -3)
        return x[s], x[-1], x[..., None], x[None, 1:3], x[[0, 2]], list(r), len(r), 4 in r, r[1], s.start

    return f, (x4(),)


@case("C4")
def tensor_attributes() -> Any:
    def f(x: torch.Tensor) -> Any:
        b, n = x.shape
        return x.view(n, b).T.reshape(-1), x.size(0), x.numel(), x.dtype, x.device.type, x.ndim, x.is_contiguous(), x.shape[1:], x.stride(), x.requires_grad

    return f, (torch.randn(2, 3, requires_grad=True),)


@case("C4")
def tensor_methods_and_dunders() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = 2 - x
        z = 1 / (abs(z) + 1)
        z = z @ y.T
        return ~(z > 0), z.ge(0) & (z < 1), -z, z[0] ** 2, 2**z, len(z), [row.sum() for row in z], z.__class__ is torch.Tensor

    return f, (torch.randn(3, 4, requires_grad=True), torch.randn(3, 4))


@case("C4")
def tensor_iteration_and_unpack() -> Any:
    def f(x: torch.Tensor) -> Any:
        a, b = x
        q, k = x.chunk(2, dim=-1)
        return a + b, q * k, torch.stack([r for r in x]), x.unbind(1)[0]

    return f, (torch.randn(2, 4, requires_grad=True),)


@case("C4")
def dtype_and_device_objects() -> Any:
    def f(x: torch.Tensor, dtype: torch.dtype) -> Any:
        y = x.to(dtype)
        z = torch.zeros(2, dtype=dtype, device=x.device)
        eps = torch.finfo(y.dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max
        return y, z, eps, str(dtype), dtype is torch.float64

    return f, [(torch.randn(3), torch.float64), (torch.randn(3), torch.int32)]


@case("C4")
def constants_created_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        w = torch.tensor([1.0, 2.0, 3.0, 4.0])
        m = torch.arange(4) % 2 == 0
        return torch.where(m, x, w), torch.full_like(x, 7.0), torch.eye(2), torch.linspace(0, 1, 4) + x

    return f, (x4(),)


@case("C4", breaks=ANY)
def assertions() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        assert x.dim() == 1, "must be 1-d"
        assert n > 0, f"n is {n}"
        return x * n

    return f, [(torch.ones(4), 2), (torch.ones(4), -2)]


@case("C4")
def globals_and_imports() -> Any:
    def f(x: torch.Tensor) -> Any:
        import math as m
        from operator import add

        return add(x, m.e) + LIMIT

    return f, (x4(),)


LIMIT = 10.0


@case("C4")
def string_methods() -> Any:
    def f(x: torch.Tensor, name: str) -> Any:
        if name.startswith("layer.") and name.endswith("weight"):
            x = x * int(name.split(".")[1])
        return x, name.upper().replace("A", "o"), name[2:5], "w" in name, name * 2, name.find("."), len(name), name.strip("l")

    return f, (x4(), "layer.3.weight")


@case("C4")
def star_expression_calls() -> Any:
    def f(xs: list[torch.Tensor], d: dict[str, Any]) -> Any:
        return torch.stack([*xs, *xs]), torch.cat(xs, **d), [*d], {**d, "k": 1}

    return f, ([torch.ones(2), torch.zeros(2)], {"dim": 0})


@case("C4")
def none_and_bool_flow() -> Any:
    def f(x: torch.Tensor, mask: torch.Tensor | None = None, flag: bool = False) -> Any:
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return (x, None) if not flag else (x, True)

    return f, [(torch.ones(3),), (torch.ones(3), torch.tensor([True, False, True])), (torch.ones(3), None, True)]


@case("C4")
def int_and_float_operations() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        k = (n << 2 | 1) ^ 3
        k //= 2
        q = -n % 3
        return x * k, q, n**2, n / 4, int(n / 4), float(n), bool(n), ~n, n.bit_length(), hash(n) == n, complex(1, 2).real, str(n), chr(65), ord("b")

    return f, (x4(), 6)


@case("C4")
def deletion_and_scopes() -> Any:
    def f(x: torch.Tensor) -> Any:
        y = x + 1
        del x
        z = [y, y]
        del z[0]
        try:
            return x  # noqa: F821
        except UnboundLocalError:
            return z[0]

    return f, (x4(),)


@case("C4")
def typing_and_annotations() -> Any:
    from typing import Optional, cast

    def f(x: torch.Tensor) -> Any:
        y: Optional[torch.Tensor] = cast(torch.Tensor, x)
        n: int = 3
        return y * n

    return f, (x4(),)


@case("C4")
def new_tensor_factories_from_shapes() -> Any:
    def f(x: torch.Tensor) -> Any:
        b, t, c = x.shape
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool, device=x.device))
        pos = torch.arange(0, t, device=x.device).unsqueeze(0).expand(b, t)
        return x.transpose(1, 2).masked_fill(mask[:c, :t], 0.0), pos, x.new_zeros(b, c), torch.zeros_like(x)

    return f, (torch.randn(2, 3, 3, requires_grad=True),)


@case("C4", tensors=False)
def dict_and_set_of_tensors_identity() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        seen = {id(x): "x", id(y): "y"}
        return x is y, x is not None, seen.get(id(x)), [t is x for t in (x, y)]

    t = torch.ones(2)
    return f, (t, t.clone())


@case("C4")
def string_building_loop() -> Any:
    def f(x: torch.Tensor) -> Any:
        out = ""
        for i, n in enumerate(x.shape):
            out += f"[{i}:{n}]"
        return x.sum(), out

    return f, (torch.randn(2, 3),)


@case("C4")
def mutable_default_argument() -> Any:
    def g(x: torch.Tensor, acc: list[int] = []) -> Any:  # noqa: B006
        acc.append(x.dim())
        return x * len(acc)

    return lambda x: g(x), [(torch.ones(2),), (torch.ones(2),), (torch.ones(2),)]


@case("C4")
def torch_size_arithmetic() -> Any:
    def f(x: torch.Tensor) -> Any:
        s = x.shape
        return x.reshape(s[:-1] + (2, s[-1] // 2)), s.numel(), s == (2, 4), tuple(s), list(s), torch.Size([1]) + s

    return f, (torch.randn(2, 4, requires_grad=True),)


@case("C4")
def formats_of_their_own() -> Any:
    class Money:
        def __format__(self, spec: str) -> str:
            return f"<{spec}>"

        def __str__(self) -> str:
            return "money"

    def f(x: torch.Tensor) -> Any:
        m = Money()
        return x + 1, f"{m}|{m:>3}|{m!s}|{m!r:.1}", format(m), "{:a} {}".format(m, x.shape[0])

    return f, (x4(),)


@case("C4")
def patterns_know_mappings_and_sequences() -> Any:
    class Pairs(collections.UserDict[str, int]):
        pass

    def kind(value: Any) -> Any:
        match value:
            case {"a": found, **rest}:
                return "mapping", found, dict(rest)
            case [first, *rest]:
                return "sequence", first, rest
            case str():
                return "text"
            case _:
                return "other"

    def f(x: torch.Tensor) -> Any:
        values = ({"a": 1, "b": 2}, [1, 2], "ab", range(2), collections.deque([3]), Pairs(a=3), 3, x.shape)
        return x + 1, [kind(value) for value in values]

    return f, (x4(),)


@case("C4")
def errors_of_calls() -> Any:
    class Empty:
        pass

    class One:
        def __init__(self, a: int) -> None:
            pass

    calls: Any = (lambda: Empty(1), lambda: One(), lambda: (lambda a, b=1: a)(1, 2, 3))  # type: ignore

    def f(x: torch.Tensor) -> Any:
        texts = []
        for call in calls:
            try:
                call()
            except TypeError as error:
                texts.append(str(error))
        return x + 1, texts

    return f, (x4(),)


@case("C4")
def super_of_a_class() -> Any:
    class Base:
        @property
        def size(self) -> int:
            return 1

    class Derived(Base):
        @classmethod
        def found(cls) -> Any:
            return super().size

        def own(self) -> Any:
            return super().size

    return lambda x: (x + Derived().own(), type(Derived.found()).__name__, Derived.__annotations__), (x4(),)


@case("C4")
def descriptor_that_only_sets() -> Any:
    class Doubled:
        def __set__(self, owner: Any, value: float) -> None:
            owner.__dict__["rate"] += value * 2

    class Holder:
        rate = Doubled()

        def __init__(self) -> None:
            self.__dict__["rate"] = 0.0

    held = Holder()

    def f(x: torch.Tensor) -> Any:
        held.rate = 10.0
        made = Holder()
        made.rate = 1.0
        return x + held.rate, made  # type: ignore[operator]

    return f, [(x4(),), (x4(),)], lambda: vars(held)


@case("C4")
def python_types_and_ranges_for_torch() -> Any:
    return lambda x: ((x * 5).to(bool).to(float), torch.tensor(range(3))), (x4().detach(),)


@case("C4", breaks=ANY)
def generator_asked_for_what_only_a_real_one_has() -> Any:
    def count(x: torch.Tensor) -> Any:
        yield x
        yield x * 2

    def f(x: torch.Tensor) -> Any:
        counting = count(x.sin())
        first = next(counting)
        return first, counting.__name__, hasattr(counting, "gi_code"), hasattr(counting, "other"), list(counting)

    return f, [(x4(),)] * 2


test_program = suite.test()
