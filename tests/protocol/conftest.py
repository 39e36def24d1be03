"""The protocol tests run the real kernels in Triton's interpreter, which has to be chosen before triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from tests import faster_interpreter

faster_interpreter.install()
