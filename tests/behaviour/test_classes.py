"""SPEC C4: classes, context managers, exceptions and `match`, captured whole and equal to plain Python."""
from __future__ import annotations

import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import sys
import threading
import weakref
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import torch

from tests.behaviour.running import ANY, Suite

suite = Suite()
case = suite.case
Held = TypeVar("Held")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor
    label: str = "p"

    def norm(self) -> torch.Tensor:
        return (self.x**2 + self.y**2).sqrt()


class Named(collections.OrderedDict):
    """Results by name and position, as model libraries return them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(given)
        self.__dict__.update(given)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 2.0
    names: tuple[str, ...] = ("a", "b")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Vector:
    """A user class with operators."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t

    def __add__(self, other: Any) -> Vector:
        return Vector(self.t + (other.t if isinstance(other, Vector) else other))

    def __radd__(self, other: Any) -> Vector:
        return self + (torch.stack(other) if isinstance(other, (list, tuple)) else other)

    def __mul__(self, k: float) -> Vector:
        return Vector(self.t * k)

    def __neg__(self) -> Vector:
        return Vector(-self.t)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.t[index]

    def __len__(self) -> int:
        return self.t.shape[0]

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        return self.t @ y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and self.t.shape == other.t.shape

    def __iter__(self) -> Any:
        return iter([self.t, self.t + 1])

    def __contains__(self, item: object) -> bool:
        return item == "yes"

    def __bool__(self) -> bool:
        return True


class Temperature:
    def __init__(self, kelvin: torch.Tensor) -> None:
        self._kelvin = kelvin

    @property
    def celsius(self) -> torch.Tensor:
        return self._kelvin - 273.15

    @celsius.setter
    def celsius(self, value: torch.Tensor) -> None:
        self._kelvin = value + 273.15

    @staticmethod
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def zero(cls, like: torch.Tensor) -> Temperature:
        return cls(torch.zeros_like(like))

    @functools.cached_property
    def twice(self) -> torch.Tensor:
        return self._kelvin * 2


class Scaled:
    """A descriptor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __get__(self, owner: Any, kind: type) -> torch.Tensor:
        return owner.base * self.factor


class Owner:
    half = Scaled(0.5)

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base


class Base:
    def go(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Derived(Base):
    def go(self, x: torch.Tensor) -> torch.Tensor:
        return super().go(x) * 3


class Flexible:
    def __init__(self) -> None:
        self.known = 2.0

    def __getattr__(self, name: str) -> float:
        if name.startswith("f_"):
            return float(len(name))
        raise AttributeError(name)


def x4() -> torch.Tensor:
    return torch.randn(4, requires_grad=True)


class Lacking:
    def __get__(self, owner: Any, kind: Any = None) -> Any:
        raise AttributeError("none")


class Falling:
    __slots__ = ("empty", "__dict__")
    none = Lacking()

    @property
    def asked(self) -> Any:
        return self.missing.number

    def __getattr__(self, name: str) -> int:
        if name == "missing":
            raise AttributeError(name)
        return len(name)


@case("C4")
def a_property_a_descriptor_or_a_slot_that_has_nothing_leaves_it_to_getattr() -> Any:
    given = Falling()

    def f(x: torch.Tensor) -> Any:
        made = Falling()
        said = [(owner.none, owner.asked, owner.empty, hasattr(owner, "missing")) for owner in (given, made)]
        return x * given.asked, said

    return f, (torch.ones(2),)


class Message(TypedDict, Generic[Held], total=False):
    kind: str
    value: Held


class Lent(metaclass=abc.ABCMeta):  # noqa: B024
    """Makes something else, which says it is one of these."""

    def __new__(cls) -> Any:
        return [1, 2]

    def __init__(self) -> None:
        raise AssertionError


Lent.register(list)


@case("C4")
def a_class_that_makes_something_else() -> Any:
    def f(x: torch.Tensor) -> Any:
        made, plain = Message[torch.Tensor](kind="sample", value=x), Message()
        made["done"] = x * 2
        return made["value"] + made["done"], made, type(made), plain, Lent()

    return f, (torch.ones(2),)


@case("C4")
def names_that_the_body_of_a_class_deletes() -> Any:
    def f(x: torch.Tensor) -> Any:
        class Made:
            rows = [1, 2]
            count = len(rows)
            del rows
            try:
                del rows
            except NameError as error:
                said = str(error)

        return x * Made.count, hasattr(Made, "rows"), Made.said

    return f, (torch.ones(2),)


class Noting:
    def __init__(self, notes: list[str]) -> None:
        self.notes, self.number = notes, 3

    def __delattr__(self, name: str) -> None:
        self.notes.append(name)
        super().__delattr__(name)


@case("C4")
def an_attribute_is_deleted_in_the_way_of_its_class_once() -> Any:
    notes: list[str] = []

    def f(x: torch.Tensor) -> Any:
        made = Noting(notes)
        del made.number
        return x * 2, hasattr(made, "number")

    return f, [(torch.ones(2),)] * 2, lambda: notes


@case("C4")
def named_tuples_of_tensors_without_dimensions() -> Any:
    pair = collections.namedtuple("pair", "u v")  # type: ignore[misc]

    def f(x: torch.Tensor) -> Any:
        return pair(x, x.sum())._replace(u=x.max()), Pair(x.mean(), x)

    return f, (torch.randn(4, requires_grad=True),)


@case("C4")
def dataclass_in_and_out() -> Any:
    def f(p: Point) -> Any:
        q = Point(p.x + 1, p.y * 2, label=p.label + "!")
        return q.norm(), q, dataclasses.replace(q, label="r").label

    return f, (Point(x4(), x4()),)


@case("C4")
def ordered_dict_subclass_made_inside() -> Any:
    def inner(x: torch.Tensor) -> Named:
        return Named(loss=x.sum(), logits=x * 2)

    def f(x: torch.Tensor) -> Any:
        made = inner(x)
        return made, made[0] + made["loss"], made.logits

    return f, (x4(),)


@case("C4")
def named_tuple_of_torch() -> Any:
    def f(x: torch.Tensor) -> Any:
        made = torch.return_types.max((x + 1, x * 2))
        return made, made.values - made[1], type(made)(t.exp() for t in made)

    return f, (x4(),)


class NoBool:
    def __bool__(self) -> Any:
        return 1.5

    @staticmethod
    def lost() -> Any:
        return super().__init__()  # type: ignore[misc]


@case("C4")
def truth_that_is_no_bool() -> Any:
    return lambda x, s: x + 1 if s else x, (x4(), NoBool())


@case("C4")
def super_without_an_object() -> Any:
    return lambda x, s: (x + 1, s.lost()), (x4(), NoBool())


@case("C4")
def frozen_dataclass() -> Any:
    return lambda x, s: x * s.scale * len(s.names), (x4(), Settings())


@case("C4")
def named_tuple() -> Any:
    def f(p: Pair) -> Any:
        a, b = p
        q = p._replace(left=a + b)
        return q, q.left * 2, Pair(*[b, a]).right

    return f, (Pair(x4(), x4()),)


@case("C4")
def enums() -> Any:
    def f(x: torch.Tensor, c: Color) -> Any:
        if c is Color.RED:
            x = x + c.value
        return x * Level.HIGH, Color(2), Color["BLUE"].name, c == Color.RED

    return f, [(x4(), Color.RED), (x4(), Color.BLUE)]


@case("C4")
def super_call() -> Any:
    o = Derived()
    return lambda x: o.go(x), (x4(),)


@case("C4")
def properties() -> Any:
    def f(x: torch.Tensor) -> Any:
        t = Temperature(x)
        t.celsius = t.celsius * 2
        return t.celsius, Temperature.double(x), Temperature.zero(x)._kelvin, t.twice, t.twice

    return f, (x4(),)


@case("C4")
def descriptors() -> Any:
    return lambda x: Owner(x).half + 1, (x4(),)


@case("C4")
def fallback_getattr() -> Any:
    o = Flexible()
    return lambda x: (x * o.known + o.f_abc, hasattr(o, "zzz"), getattr(o, "missing", 4)), (x4(),)


@case("C4")
def user_operators() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        v = Vector(x) + Vector(y) * 2.0
        w = -v + 1.0
        parts = [p.sum() for p in w]
        return w.t, w(y), w[0], len(w), v == w, "yes" in v, parts, (2.0 + v).t if v else None, ([*y] + w).t

    return f, (x4(), torch.randn(4))


@case("C4")
def context_manager_user() -> Any:
    class Adding:
        def __init__(self, k: float) -> None:
            self.k, self.log = k, []

        def __enter__(self) -> Adding:
            self.log.append("in")
            return self

        def __exit__(self, *error: Any) -> bool:
            self.log.append("out")
            return False

    def f(x: torch.Tensor) -> Any:
        with Adding(2.0) as a:
            y = x + a.k
        return y, a.log

    return f, (x4(),)


@case("C4")
def contextlib_manager() -> Any:
    @contextlib.contextmanager
    def scaled(k: float) -> Any:
        yield k * 2

    def f(x: torch.Tensor) -> Any:
        with scaled(3.0) as k, contextlib.nullcontext(1.0) as one:
            return x * k + one

    return f, (x4(),)


@case("C4")
def exceptions_caught() -> Any:
    def f(x: torch.Tensor) -> Any:
        log = []
        try:
            log.append("try")
            raise ValueError("boom")
        except (KeyError, ValueError) as e:
            log.append(str(e))
            x = x * 2
        else:
            log.append("else")
        finally:
            log.append("finally")
        return x, log

    return f, (x4(),)


@case("C4")
def exceptions_from_callee() -> Any:
    def pick(d: dict[str, Any], k: str) -> Any:
        try:
            return d[k]
        except KeyError as e:
            raise AttributeError(k) from e

    def f(x: torch.Tensor) -> Any:
        try:
            return pick({"a": x}, "b")
        except AttributeError as e:
            return x + len(str(e)), type(e.__cause__).__name__

    return f, (x4(),)


@case("C4", breaks=ANY)
def exception_raised_to_caller() -> Any:
    def f(x: torch.Tensor, n: int) -> Any:
        y = x + 1
        if n > 2:
            raise RuntimeError(f"n is {n}")
        return y

    return f, [(x4(), 1), (x4(), 3)]


@case("C4", breaks=ANY)
def exception_from_tensor_op() -> Any:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        try:
            return x @ y
        except RuntimeError:
            return x + 1

    return f, (torch.randn(3, 4), torch.randn(3, 4))


@case("C4")
def match_statement() -> Any:
    def f(x: torch.Tensor, command: Any) -> Any:
        match command:
            case ("scale", k):
                return x * k
            case {"add": b, **rest}:
                return x + b + len(rest)
            case [first, *others]:
                return x + first + len(others)
            case str() as s if s.startswith("n"):
                return -x
            case Point(label="q"):
                return x * 7
            case 1 | 2:
                return x * 11
            case _:
                return x

    calls: list[Any] = [("scale", 3.0), {"add": 1, "z": 2}, [5, 6, 7], "neg", Point(torch.ones(1), torch.ones(1), "q"), 2, None]
    return f, [(torch.ones(4), c) for c in calls]


@case("C4")
def attribute_builtins() -> Any:
    class Box:
        pass

    def f(x: torch.Tensor) -> Any:
        b = Box()
        b.value = x
        setattr(b, "other", x + 1)
        has = hasattr(b, "nothing")
        delattr(b, "other")
        return b.value * 2, has, hasattr(b, "other"), sorted(vars(b)), b.__class__.__name__

    return f, (x4(),)


@case("C4")
def slot_that_is_empty_at_first() -> Any:
    class Slotted:
        __slots__ = ("count", "other")

        def __getattr__(self, name: str) -> Any:
            return 10

    class Plain:
        __slots__ = ("count",)

    one, two = Slotted(), Plain()

    def f(x: torch.Tensor) -> Any:
        one.count += 1
        two.count = getattr(two, "count", 0) + 1
        return x * one.count, two.count, one.other

    return f, [(x4(),)] * 4


@case("C4")
def attribute_that_lives_for_a_moment() -> Any:
    class Box:
        kept = 1

    def g() -> None:
        pass

    def f(x: torch.Tensor) -> Any:
        Box.n = g.n = 3  # type: ignore[attr-defined]
        y = x * Box.n * g.n  # type: ignore[attr-defined]
        y.n = 3  # type: ignore[attr-defined]
        del Box.n, g.n, y.n  # type: ignore[attr-defined]
        return y, hasattr(Box, "n"), hasattr(g, "n"), hasattr(y, "n")

    return f, [(x4(),)] * 2, lambda: (vars(g), "n" in vars(Box))


@case("C4")
def operator_that_is_not_for_its_own_class() -> Any:
    class Scaled:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def __mul__(self, other: Any) -> Any:
            return NotImplemented if isinstance(other, Scaled) else Scaled(self.x * other)

        def __rmul__(self, other: Any) -> Any:
            return "reflected"

        def __lt__(self, other: Any) -> Any:
            return NotImplemented

        def __gt__(self, other: Any) -> Any:
            return "turned"

    def f(x: torch.Tensor) -> Any:
        try:
            Scaled(x) * Scaled(x)
        except TypeError as error:
            return (Scaled(x) * 3).x, 3 * Scaled(x), Scaled(x) < Scaled(x), str(error)

    return f, (x4(),)


@case("C4", recompiles=1)
def descriptors_with_a_state() -> Any:
    class Logged:
        def __init__(self) -> None:
            self.log: list[str] = []

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            if owner is None:
                return self
            self.log.append("get")
            return owner.__dict__.get("x", 1.0)

        def __set__(self, owner: Any, value: Any) -> None:
            self.log.append("set")
            owner.__dict__["x"] = value

        def __delete__(self, owner: Any) -> None:
            self.log.append("delete")
            del owner.__dict__["x"]

    class Owner:
        x = Logged()
        k = 2

        @property
        def y(self) -> Any:
            return self.__dict__.get("y", 0) * 2

        @y.setter
        def y(self, value: Any) -> None:
            self.__dict__["y"] = value

    owner = Owner()

    def f(x: torch.Tensor) -> Any:
        owner.x = x
        z = owner.x * owner.x
        del owner.x
        owner.y = z + owner.y
        said = None
        try:
            del owner.k
        except AttributeError as error:
            said = str(error)
        made = owner.x, owner.y, list(Owner.x.log), said
        Owner.x.log.clear()
        return made

    return f, [(x4().detach(),)] * 4


@case("C4", recompiles=1)
def what_a_class_has_of_its_own() -> Any:
    class Table:
        made: Any = None

        @classmethod
        def get(cls) -> Any:
            if cls.made is None:
                cls.made = torch.eye(4)
            return cls.made

    class Own(Table):
        pass

    return lambda x: (x @ Own.get(), "made" in vars(Own), vars(Table)["made"]), [(x4(),)] * 3


@case("C4")
def text_of_a_dataclass_that_holds_itself() -> Any:
    @dataclasses.dataclass
    class Node:
        size: int
        others: list[Any] = dataclasses.field(default_factory=list)

    def f(x: torch.Tensor) -> Any:
        node = Node(x.shape[0], [Node(1)])
        node.others.append(node)
        return x * 2, f"{node}", repr(node.others)

    return f, (x4(),)


@case("C4")
def callable_instance_and_bound_method() -> Any:
    v = Vector(torch.ones(4))
    method = v.__add__
    return lambda x: (v(x), method(1.0).t + x), (x4(),)


@case("C4")
def class_created_inside() -> Any:
    def f(x: torch.Tensor) -> Any:
        p = Point(x, x + 1)
        p.label = "new"
        p.x = p.x * 3
        return p

    return f, (x4(),)


@case("C4")
def inheritance_and_class_attributes() -> Any:
    class A:
        factor = 2.0
        names = ["a"]

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    class B(A):
        factor = 5.0

        def __init__(self) -> None:
            self.bias = 1.0

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return super().run(x) + self.bias + len(self.names)

    b = B()
    return lambda x: (b.run(x), A.run(b, x), isinstance(b, A), type(b).factor), (x4(),)


@case("C4")
def try_finally_return() -> Any:
    def f(x: torch.Tensor) -> Any:
        log = []
        try:
            try:
                return x * 2, log
            finally:
                log.append(1)
        finally:
            log.append(2)

    return f, (x4(),)


@case("C4")
def reraise_and_custom_exception() -> Any:
    class Stop(Exception):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__("stop")
            self.value = value

    def inner(x: torch.Tensor, n: int) -> None:
        if n == 2:
            raise Stop(x * n)

    def f(x: torch.Tensor) -> Any:
        try:
            for n in range(5):
                try:
                    inner(x, n)
                except ValueError:
                    pass
        except Stop as s:
            return s.value, n

    return f, (x4(),)


@case("C4")
def attributes_of_a_thread() -> Any:
    class Settings(threading.local):
        scale = 2.0

        def __init__(self) -> None:
            self.stack = [1]

        def push(self, item: int) -> None:
            self.stack.append(item)

    settings, plain, seen = Settings(), threading.local(), []

    def f(x: torch.Tensor) -> Any:
        settings.push(len(settings.stack))
        plain.calls = getattr(plain, "calls", 0) + 1
        settings.scale = settings.scale * 2
        return x * settings.scale + plain.calls + sum(settings.stack), hasattr(plain, "other")

    def effects() -> Any:
        reader = threading.Thread(target=lambda: seen.append((settings.scale, settings.stack, vars(plain))))
        reader.start()
        reader.join()
        return seen, settings.stack, settings.scale, plain.calls

    return f, [(x4(),)] * 3, effects


class Cached:
    default, count = 3.0, 0

    @functools.cached_property
    def costly(self) -> int:
        self.count += 1
        return self.count

    def __divmod__(self, other: int) -> tuple[int, int]:
        return other, 7


@case("C4")
def what_a_deleted_attribute_hid() -> Any:
    made = Cached()

    def f(x: torch.Tensor) -> Any:
        made.default = 5.0
        before = made.costly + made.costly + made.default
        del made.costly, made.default
        return x * before + made.costly * made.default, divmod(made, 2)

    return f, [(x4(),)] * 2, lambda: vars(made)


class ItemsAsAttributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class OwnDict(dict):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__ = self


class ItemsIfMissing(dict):
    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, name)
        except AttributeError:
            if name in self:
                return self[name]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


@case("C4")
def dicts_with_attributes() -> Any:
    """Three ways in which people write them."""
    kinds = ItemsAsAttributes, OwnDict, ItemsIfMissing
    settings = [kind(scale=2.0, steps=0, inner=kind(bias=1.0)) for kind in kinds]

    def f(x: torch.Tensor) -> Any:
        for kind, given in zip(kinds, settings):
            given.steps += 1
            given.last = given.steps * given.inner.bias
            local = kind(y=x * given.scale)
            local.z = local.y + given["last"] + len(given)
            del given.last
            x = local["z"] + hasattr(given, "items") + ("last" in given)
        return x

    return f, [(x4(),)] * 3, lambda: [dict(given) for given in settings]


class Shouting(str):
    def __str__(self) -> str:
        return self.upper()


class Doubled(int):
    def __int__(self) -> int:
        return 2 * self


class Backwards(list):
    def __iter__(self) -> Any:
        return reversed(self)


class Mirrored(tuple):
    def __iter__(self) -> Any:
        return reversed(tuple(self[i] for i in range(len(self))))


@case("C4")
def contents_that_show_themselves_otherwise() -> Any:
    """What the program makes of them is what is in them, not what they say."""
    made: list[Any] = []

    def f(x: torch.Tensor) -> Any:
        made[:] = Shouting("quiet"), Doubled(3), Backwards([1, 2]), Mirrored((1, 2))
        return x + made[1]

    return f, (x4(),), lambda: [made[0][:3], made[1] + 0, made[2][0], made[3][0], str(made[0]), int(made[1]), [*made[2]], [*made[3]]]



@case("C3", breaks=ANY, tensors=False)
def a_super_of_the_program_s_own() -> Any:
    space: dict[str, Any] = {"torch": torch}
    exec("class Base: pass\nclass Made(Base):\n  def step(self, x): return super().x * x", space)

    def f(x: torch.Tensor, scale: float) -> Any:
        space["super"] = lambda *_: Point(scale, 0.0)  # type: ignore[call-arg,arg-type]
        return space["Made"]().step(x)

    return f, [(x4(), 2.0), (x4(), 3.0)]


if sys.version_info >= (3, 12):  # which has the syntax

    @case("C3", breaks=ANY, tensors=False)
    def type_parameters() -> Any:
        space: dict[str, Any] = {}
        exec("""if True:
            def f(x):
                def base(make): return dict
                class Box[T](base(lambda: T)):
                    def get[U](self, v: U) -> U: return v
                class Tree[T: Tree, U: (Tree, Tree)]: pass
                return Box().get(x) + 1, Box.__name__, len(Tree.__type_params__)
        """, space)
        return space["f"], (x4(),)



class Watched:
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name.replace("two_", "two"))

    def __getattr__(self, name: str) -> Any:
        if name == "nothing":
            raise AttributeError(name)
        return len(name)


@case("C4")
def getattribute_then_getattr() -> Any:
    watched = Watched()
    watched.two = 2

    def f(x: torch.Tensor) -> Any:
        return x * watched.four + watched.two_ + hasattr(watched, "nothing")

    return f, (x4(),)


class Counting:
    def __init__(self) -> None:
        self.scale, self.reads = 2.0, 0

    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            object.__setattr__(self, "reads", object.__getattribute__(self, "reads") + 1)
        return object.__getattribute__(self, name)


@case("C4")
def getattribute_that_counts() -> Any:
    counting = Counting()

    def f(x: torch.Tensor) -> Any:
        y = x * counting.scale + counting.scale
        counting.scale = 3.0
        return y * counting.scale, counting.reads

    return f, [(x4(),)] * 3, lambda: counting.reads


class Titled(type):
    @property
    def title(cls) -> str:
        return f"the class {cls.__name__}"


class Report(metaclass=Titled):
    title = "a report"  # type: ignore[assignment]


@case("C4")
def property_of_a_metaclass_comes_first() -> Any:
    return lambda x: (x * len(Report.title), Report.title, Report().title), (x4(),)


class Linked:
    def __init__(self) -> None:
        self.items, self.other = [1], self

    def __deepcopy__(self, memo: dict[int, Any]) -> Linked:
        made = memo[id(self)] = Linked.__new__(Linked)
        made.items, made.other = copy.deepcopy(self.items, memo), copy.deepcopy(self.other, memo)
        return made


@case("C4")
def deepcopy_with_a_memo() -> Any:
    linked = Linked()

    def f(x: torch.Tensor) -> Any:
        one, two = copy.deepcopy([linked, linked])
        one.items.append(2)
        return x * len(two.items), one is two, one.other is one, one is linked, linked.items

    return f, (x4(),)


class Counted(dict[str, int]):
    def __getitem__(self, name: str) -> int:
        return super().__getitem__(name) + 1


@case("C4")
def dict_of_a_dict_with_items_of_its_own() -> Any:
    counted = Counted(a=1)

    def f(x: torch.Tensor) -> Any:
        return x * counted["a"], dict(counted), {**counted}, {"b": 2} | counted

    return f, (x4(),)


class Slotted:
    __slots__ = ("scale",)


@case("C4")
def attribute_without_a_place() -> Any:
    slotted: Any = Slotted()
    slotted.scale = 2.0

    def f(x: torch.Tensor) -> Any:
        try:
            slotted.other = 1
        except AttributeError as error:
            return x * slotted.scale, str(error)
        return x

    return f, (x4(),)


BIAS = 1


@case("C4", recompiles=0)
def classes_made_in_the_frame() -> Any:
    """Bodies read variables of the frame and globals; a class has a state of its own in each call."""

    def f(x: torch.Tensor, scale: int) -> Any:
        total = x.sum()

        class Base:
            factor = scale + BIAS
            seen: list[Any] = []

            def __init__(self, value: Any) -> None:
                self.value = value
                self.seen.append(value)

            def run(self) -> Any:
                return self.value * self.factor + total

        class Derived(Base):
            limit: int = 3

            def run(self) -> Any:
                return super().run() + self.limit + len(self.seen)

            @classmethod
            def of(cls, value: Any) -> Any:
                cls.limit = 5
                return cls(value)

        Base.extra = 2
        made = Derived.of(x).run() * Base.extra
        del Base.extra
        return made, Derived.__qualname__, list(Derived.__annotations__), hasattr(Base, "extra")

    return f, [(x4(), 2), (x4(), 2)]


@case("C4", recompiles=0)
def records_and_enums_made_in_the_frame() -> Any:
    def f(x: torch.Tensor) -> Any:
        pair = collections.namedtuple("pair", "u v")  # type: ignore[misc]

        class Typed(NamedTuple):
            u: torch.Tensor
            v: int = 3

        @dataclasses.dataclass(frozen=True, slots=True)
        class Point:
            x: torch.Tensor
            tags: list[Any] = dataclasses.field(default_factory=list)

        class Way(enum.IntEnum):
            UP = enum.auto()
            DOWN = enum.auto()

            def go(self, y: Any) -> Any:
                return y * self

        class Stop(ValueError):
            pass

        p, q, r = pair(x, 2), Typed(x), dataclasses.replace(Point(x), tags=[1])
        try:
            r.x = 1  # type: ignore[misc]
        except dataclasses.FrozenInstanceError:
            r.tags.append(2)
        try:
            raise Stop("here")
        except ValueError as error:
            return Way.DOWN.go(p.u * p.v + q.u * q.v + r.x), r.tags, [way.name for way in Way], str(error), pair.__module__

    return f, [(x4(),)] * 3


@case("C4", recompiles=0)
def functions_with_gradients_and_modules_made_in_the_frame() -> Any:
    def f(x: torch.Tensor) -> Any:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a)
                return a * a

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return 3 * ctx.saved_tensors[0] * grad

        class Double(torch.nn.Module):
            def forward(self, a: torch.Tensor) -> torch.Tensor:
                return a * 2

        return Double()(Square.apply(x))

    return f, [(x4().requires_grad_(),)] * 3


@case("C4", breaks=1, recompiles=2)
def class_that_outlives_the_frame() -> Any:
    """Each call has a class of its own: the rest of the frame is not compiled for every one of them."""
    made: list[Any] = []

    def f(x: torch.Tensor) -> Any:
        class Local:
            scale = 2

        made.append(Local)
        return x.sin() * Local.scale

    return f, [(x4(),)] * 8, lambda: (len(set(made)), made[0].__qualname__)


class Registered:
    names: list[str] = []

    def __init_subclass__(cls) -> None:
        Registered.names.append(cls.__name__)


@case("C4", breaks=1, recompiles=2)
def class_that_runs_code_when_it_is_made() -> Any:
    Registered.names.clear()

    def f(x: torch.Tensor) -> Any:
        class Local(Registered):
            scale = 2

        return x.sin() * Local.scale

    return f, [(x4(),)] * 8, lambda: list(Registered.names)


class Backend:
    made: dict[str, Backend] = {}

    def scale(self) -> int:
        return 1


class Doubling(Backend):
    def scale(self) -> int:
        return 2


@case("C4", recompiles=1)
def subclasses_looked_for_and_made_once() -> Any:
    Backend.made.clear()

    def f(x: torch.Tensor) -> torch.Tensor:
        if "first" not in Backend.made:
            for kind in Backend.__subclasses__():
                Backend.made["first"] = kind()
        return x * Backend.made["first"].scale()

    return f, [(x4(),)] * 8, lambda: [(name, type(backend)) for name, backend in Backend.made.items()]


class Reflecting:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __sub__(self, other: Any) -> Any:
        return "sub", self.x - other.x

    def __rsub__(self, other: Any) -> Any:
        return "rsub", other.x - self.x


class Inheriting(Reflecting):
    pass


class Overriding(Reflecting):
    def __rsub__(self, other: Any) -> Any:
        return "own", other.x - self.x


@case("C4")
def reflected_operators_of_subclasses() -> Any:
    def f(x: torch.Tensor) -> Any:
        plain = Reflecting(x)
        return plain - Inheriting(x * 2), plain - Overriding(x * 3), Inheriting(x) - plain

    return f, [(x4(),)] * 2


@case("C4", breaks=0)
def members_of_enums_stay_what_they_are() -> Any:
    def f(x: torch.Tensor) -> Any:
        try:
            Color.RED = 3  # type: ignore[misc, assignment]
        except AttributeError as error:
            return x * Color.RED.value, str(error)
        return x, None

    return f, [(x4(),)] * 2


class SettingTwice(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2 if name == "size" else value)


class Sized(metaclass=SettingTwice):
    size = 1


@case("C4", breaks=0, recompiles=ANY)
def metaclass_that_sees_assignments() -> Any:
    Sized.size = 1

    def f(x: torch.Tensor) -> Any:
        Sized.size = 5
        return x + Sized.size

    return f, [(x4(),)] * 2, lambda: Sized.size


class Saved:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.x = state["x"] + 1


@case("C4", breaks=2)
def copies_that_a_class_makes_its_own_way() -> Any:
    def f(x: torch.Tensor) -> Any:
        return copy.copy(Saved(x)).x, copy.deepcopy(Saved(x * 2)).x

    return f, [(x4(),)] * 2


class Choosing:
    def __new__(cls, x: Any) -> Any:
        return object.__new__(Chosen)


class Chosen(Choosing):
    def __init__(self, x: Any) -> None:
        self.x = x * 2


@case("C4")
def class_that_makes_another() -> Any:
    def f(x: torch.Tensor) -> Any:
        return Choosing(x).x  # type: ignore[attr-defined]

    return f, [(x4(),)] * 2


@case("C4")
def counter_that_equals_a_dict() -> Any:
    def f(x: torch.Tensor) -> Any:
        counted = collections.Counter("aab")
        return x * 2, counted == {"a": 2, "b": 1}, counted != {"a": 2, "b": 1}, {"a": 2, "b": 1} == counted

    return f, [(x4(),)] * 2


class Watcher:
    def __init__(self) -> None:
        self.seen = 0

    def gone(self, reference: Any) -> None:
        self.seen += 1


@case("C4", breaks=ANY)
def end_of_an_object_told_to_a_method() -> Any:
    watcher = Watcher()

    def f(x: torch.Tensor) -> Any:
        held = Reflecting(x)
        reference = weakref.ref(held, watcher.gone)
        return x + 1, reference() is held

    return f, [(x4(),)] * 2, lambda: watcher.seen


test_program = suite.test()
