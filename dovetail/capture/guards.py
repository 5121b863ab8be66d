"""Guards that are decided at the beginning or at the end of a capture, not while reading.

state_guards()          torch's global state: grad mode, autocast, default dtype ...
alias_guards(trace)     what was changed is not, in another call, also something else
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, product
from typing import Final

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from dovetail.capture.origins import may_be_written, raw_items
from dovetail.capture.trace import Origin, Trace, Unread
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Equals, Guard, Predicate, SameAs, State
from dovetail.ir.source import Arg, Const, DictAttr, Item, KeyItem, Source
from dovetail.util.torch_state import read_state


def state_guards() -> list[Guard]:
    """Call before entering modes of our own: they are part of the state. Under forward-mode differentiation
    tensors carry tangents, which a compiled graph would lose."""
    level = DictAttr(Const("forward_ad", forward_ad), "_current_level")
    return [Guard(Const("torch", None), State(read_state())), Guard(level, Equals(-1))]


def why_not_now() -> tuple[str, bool] | None:
    """Something is at work that sees each operation; what it is applied to runs in eager meanwhile. And
    whether that is an error with fullgraph=True: a transform could be applied inside instead."""
    if torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack():
        return "torch.jit.trace and dispatch modes see what runs in eager", False
    for i in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(i)) is not DeviceContext:
            return "a torch function mode sees what runs in eager", False
    if torch.is_anomaly_enabled():
        return "anomaly detection names the op of eager that it finds", False
    torch._C._vmapmode_increment_nesting()
    if torch._C._vmapmode_decrement_nesting():  # what is left
        return "gradients in a batch (is_grads_batched=True) have no memory of their own", False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function under torch.func runs in eager", True
    if forward_ad._current_level >= 0:
        return "a function under forward-mode differentiation runs in eager", True
    return None


def alias_guards(trace: Trace) -> Iterator[Guard]:
    """Two arguments, two collections, or two objects with an attribute that was read, were different, and one
    was changed: they must stay different. And what autograd let the program write must stay so."""
    with torch._C.DisableTorchFunction():
        fakes = [origin for origin in trace.known.values() if isinstance(origin.stand_in, Fake)]
        computed = [origin for origin in fakes if may_be_written(origin.original)]
    for origin in filter(is_changed, computed):
        yield Guard(origin.source, Predicate(may_be_written, "is no leaf and no view"))
    known = trace.known.values()
    mutable = [one for one in known if is_passed(one.source) or isinstance(one.original, COLLECTIONS)]
    touched = set(trace.touched)
    changed = (one for one in mutable if is_changed(one) or id(one.stand_in) in touched)
    names, origins = {name for _, name in trace.writes}, trace.origins
    readers = [(origins[owner], name) for owner, name in trace.reads if name in names and owner in origins]
    written = ((origins[owner], other) for owner, name in trace.writes if owner in origins
               for other, read in readers if read == name)  # fmt: skip
    told: set[frozenset[int]] = set()
    for one, other in chain(product(changed, mutable), written):
        if type(one.original) is type(other.original) and one.original is not other.original:
            if (pair := frozenset((id(one), id(other)))) not in told:
                told.add(pair)
                yield Guard(one.source, SameAs(other.source, same=False))


COLLECTIONS: Final = (list, dict, set, deque)


def is_passed(source: Source) -> bool:
    """An argument, or an item of one."""
    while isinstance(source, (Item, KeyItem)):
        source = source.of
    return isinstance(source, Arg)


def is_changed(origin: Origin) -> bool:
    now = origin.stand_in
    if isinstance(now, Fake):
        return now.is_inference() or now._version > 0  # an inference tensor does not count its changes
    if isinstance(now, Unread):
        return bool(now.added)
    if origin.before is None:
        return False
    if isinstance(now, set):
        return bool(now != origin.before)
    if isinstance(now, dict):
        items, before = (list(chain.from_iterable(raw_items(d))) for d in (now, origin.before))
    else:
        items, before = list(now), list(origin.before)
    return len(items) != len(before) or any(a is not b for a, b in zip(items, before))
