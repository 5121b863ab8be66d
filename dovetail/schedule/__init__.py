"""Loops -> Schedule -> Plan: which nests share a kernel, and where every buffer lives."""
from __future__ import annotations

from dovetail.schedule.fuse import schedule
from dovetail.schedule.memory import plan
