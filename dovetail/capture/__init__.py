"""Capture: a frame's bytecode to an fx graph, guards and the text of an entry."""
from dovetail.capture.dynamic import History
from dovetail.capture.frame import Frame
from dovetail.capture.root import capture_frame, make_entry
from dovetail.capture.skip import why_not_capture

__all__ = ["Frame", "History", "capture_frame", "make_entry", "why_not_capture"]
