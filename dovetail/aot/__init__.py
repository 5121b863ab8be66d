"""Ahead-of-time autograd: a captured program becomes functional forward and backward graphs.

joint = trace_joint(gm, examples)                     run on fakes, record both passes
parts = partition(joint.graph, joint.signature)       decide what is saved
call = bind(forward, backward, parts, joint)          the compiled graphs as a program again
"""

from dovetail.aot.bind import Bound, bind, expected_backwards
from dovetail.aot.interpret import run_graph
from dovetail.aot.joint import Joint, trace_joint
from dovetail.aot.partition import Partition, Saved, partition
