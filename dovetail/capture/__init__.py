"""Capture: a frame's bytecode to an fx graph, guards and the text of an entry."""

from dovetail.capture.contexts import SWITCHES
from dovetail.capture.dynamic import History, all_guards
from dovetail.capture.frame import Frame
from dovetail.capture.root import capture_frame, is_wall, make_entry, why_not_capture, why_not_now
