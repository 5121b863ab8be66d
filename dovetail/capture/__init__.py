"""Capture: a frame's bytecode to an fx graph, guards and the text of an entry."""
from dovetail.capture.frame import Frame
from dovetail.capture.root import capture_frame

__all__ = ["Frame", "capture_frame"]
