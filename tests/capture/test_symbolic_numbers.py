"""What Python can do with an int, done with one that the capture has a symbol for: equal to eager, also in type and text."""
from __future__ import annotations

import collections
import math
from itertools import count, repeat
from operator import itemgetter
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import pytest
import torch

import dovetail

EXPRESSIONS: Final = """
    ~n & 7 ; -n & 7 ; (-n) >> 1 ; n << 2 ; 3 << n ; n ^ 5 ; -n // 3 ; -n % 3 ; n % -3 ; 7 // n ; 2 ** n ; n ** -1 ; n ** 0.5 ; n / 4 ; divmod(n, 3)
    ; divmod(20, n) ; abs(-n) ; not n ; n and 3 ; complex(n) ; ~(n > 3) ; -(n > 3) ; (n > 3) + 1 ; int(n * 1.7) ; n // 2.0 ; n % 1.5 ; min(n, 2.5)
    ; str(n) ; repr(n) ; f'{n:03d}' ; f'{n!r:>4}' ; '%d' % n ; '%s-%s' % (n, [n]) ; '%s' % [n] ; '{}'.format(n) ; '{0:d} {k}'.format(n, k=[n]) ; hex(n)
    ; '{a}'.format_map({'a': n}) ; str([n, 2]) ; repr({1: (n, [n])}) ; f'{torch.zeros(n).shape}' ; f'{3:{n}}' ; format(n, '05d') ; n.__format__('d') ; str(n > 3)
    ; round(n / 3, 1) ; round(n * 10, -1) ; math.floor(n / 2) ; math.gcd(n, 4) ; math.factorial(n) ; math.log2(n) ; math.prod([n, 2]) ; chr(n + 60)
    ; sorted([n, 3, 4]) ; list(range(n)) ; range(n)[-1] ; n in range(10) ; n in {4, 5} ; {n: 1} ; {n, 1} ; [0] * n ; 'a' * n ; 'abcdefgh'[:n] ; bytes(n)
    ; n.bit_length() ; n.real ; n.to_bytes(2, 'big') ; n.__class__.__name__ ; type(n) is int ; isinstance(n, (float, str)) ; hash(n) == hash(5) ; n.__index__()
    ; pow(n, 2, 3) ; list(enumerate('ab', n)) ; 'x'.join(map(str, range(n))) ; 'a'.zfill(n) ; 'a,b,c'.split(',', n) ; [5, 5, n].count(n) ; slice(n).indices(9)
    ; {5: 'a'}.get(n) ; {5: 'a', 4: 'b', 7: 'd'}[n] ; all([n, 1]) ; int(str(n)) ; n - True ; set(range(n)) & {1, 2} ; math.inf > n
    ; Counter()[n] ; Counter([n])[n] ; defaultdict(list)[n] ; OrderedDict({n: 2})[n]
    ; repr(count(n)) ; f'{repeat(n, 3)}' ; str(itemgetter(n)) ; repr(SimpleNamespace(a=[n])) ; '%s' % mappingproxy({'a': n}) ; '{!r}'.format(count(n, 2))
"""


@pytest.mark.parametrize("text", [part.strip() for part in EXPRESSIONS.split(" ;")])
def test_equal_to_eager(text: str) -> None:
    scope: dict[str, Any] = {"math": math, "torch": torch, **vars(collections)}
    scope |= {kind.__name__: kind for kind in (count, repeat, itemgetter, MappingProxyType, SimpleNamespace)}
    exec(f"def f(x, n):\n    return ({text}), x + 1", scope)
    compiled = dovetail.compile(scope["f"], backend="eager", dynamic=True, options={"fallback_to_eager": False})
    for n in (5, 7, 4):
        want, got = scope["f"](torch.zeros(1), n)[0], compiled(torch.zeros(1), n)[0]
        assert type(got) is type(want) and got == want and repr(got) == repr(want)
    dovetail.reset()
