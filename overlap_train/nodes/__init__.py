"""Groups that span nodes: their slots, streams, transports, and the engines of their operators.

Loaded by group/span.py for the first group that spans nodes. It adds its engines to the table of operators (ops/table.py).
"""

from .connect import SeveralNodes
from .register import register_engines

register_engines()
__all__ = ["SeveralNodes"]
