"""Distinct types for numbers that must not be mixed up: a cell is not a position, and neither is a byte."""
from typing import NewType

Token = NewType("Token", int)
Cells = NewType("Cells", int)
Position = NewType("Position", int)
Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)
